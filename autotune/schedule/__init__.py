"""Executes the schedules that the TPU compiler dumps, and tells how long a program takes."""
