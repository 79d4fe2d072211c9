"""A process that opens a table and prints what it found: ``python -m tests.data.tables.opener``.

Arguments as JSON: ``prefix``, ``folder``, ``log`` (a line is added for every build); ``stall``: say
so on standard output once the first rows are written, and never write the rest; ``start``: a file
to wait for; ``unlocked``: as if there were no lock.
"""

import hashlib
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from megatron_hdp.data.tables import cache
from megatron_hdp.data.tables.cache import TableCache
from megatron_hdp.data.tables.cache_file import TableWriter
from tests.data.tables.pairs import everything, open_table


@contextmanager
def no_lock(path, what, say, *, patience_s):
    yield say


def main():
    said = json.loads(sys.argv[1])
    build, put = TableCache._build, TableWriter.put

    def logged(self, progress):
        with open(said["log"], "a") as log:
            log.write("built\n")
        # so that the others come before it is done: surely where it shows that there is no lock
        time.sleep(0.1)
        while said.get("unlocked") and Path(said["log"]).read_text().count("built\n") < 2:
            time.sleep(0.005)
        build(self, progress)

    def stalled(self, name, first, values):
        put(self, name, first, values)
        print("stalled", flush=True)
        time.sleep(600)

    TableCache._build = logged
    if said.get("stall"):
        TableWriter.put = stalled
    if said.get("unlocked"):
        cache.locked = no_lock
    print("ready", flush=True)
    while said.get("start") and not Path(said["start"]).exists():
        time.sleep(0.005)
    table = open_table(said["prefix"], max_length=9, cache_folder=Path(said["folder"]))
    print(hashlib.sha256(repr(everything(table)).encode()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
