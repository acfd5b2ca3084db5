"""A page about one score: what limits a program, how busy each unit is, and what happened when."""

from autotune.report.page import report_page as report_page
