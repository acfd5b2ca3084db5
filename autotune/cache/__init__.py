"""Tunings that are kept: which tiling is best for a problem on a chip, and which ones failed.

**Where tilings come from.** At a call, in this order: a tiling given explicitly (which never comes here); the
contexts of `use`, innermost first; the user's files; the files that the kernel's package ships; the kernel's
own default. The first of these layers that has a tiling which holds decides. `lookup` is that, `considered`
tells it step by step.

**What is compared.** The time that an entry keeps is compared only to times of the same problem, chip, source
and conditions, when two results of tuning are merged. No ranking mixes sources: where a layer has several
entries for a problem, measured comes before schedule, and schedule before roofline, whatever their times.
Tilings of one chip are never used for another, and a CPU is no chip.

**The key.** The problem (kernel, shapes, dtypes and params, exactly), the chip, the source, and conditions:
digest of the kernel's code, figures of the chip, versions of jax, jaxlib, libtpu and of the scorer. An entry
whose conditions differ from what is here does not hold; it stays in its file, for another environment may
want it. What an entry does not name is not asked for: so shipped tilings may outlive a release of the
compiler (`Entry.without_conditions`), at the cost of perhaps not being the best any more. Where no compiler
is installed, its version is not asked for either. A kernel may declare buckets of problems that want the
same tiling.

**Files.** One JSON file for each chip, see docs/tilings.md. They are read once in a process; `reload` reads
them anew. Nothing looks at them at each call: even to ask for a file's time takes as long as a whole lookup
may. What this process stores holds at once. A bad file is renamed, never removed, and only in the user's
folder.

**Failures.** Tilings that failed are kept with the reason, are not tried again (`known_failures`), and are
never looked up, even where an entry of another layer or source recommends them for the same problem.

**Ranks.** `agreed` lets the first rank decide for all; `following` lets all look up what the first one has.

Importing this package imports neither torch nor JAX.
"""

from autotune.cache.contexts import use as use
from autotune.cache.entry import Entry as Entry
from autotune.cache.entry import Failure as Failure
from autotune.cache.entry import Provenance as Provenance
from autotune.cache.entry import merge as merge
from autotune.cache.entry import tiling_fields as tiling_fields
from autotune.cache.entry import tiling_text as tiling_text
from autotune.cache.find import Considered as Considered
from autotune.cache.find import Found as Found
from autotune.cache.find import considered as considered
from autotune.cache.find import known_failures as known_failures
from autotune.cache.find import lookup as lookup
from autotune.cache.find import tuned as tuned
from autotune.cache.kernel import Kernel as Kernel
from autotune.cache.notices import TilingsWarning as TilingsWarning
from autotune.cache.ranks import FirstRankFailed as FirstRankFailed
from autotune.cache.ranks import agreed as agreed
from autotune.cache.ranks import following as following
from autotune.cache.record import new_entry as new_entry
from autotune.cache.text import BadFile as BadFile
from autotune.cache.text import from_text as from_text
from autotune.cache.text import to_text as to_text
from autotune.cache.user import reload as reload
from autotune.cache.user import store as store
from autotune.cache.user import user_directory as user_directory
