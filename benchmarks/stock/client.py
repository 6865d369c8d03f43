"""The script that the recipe gives to every site. It names what it runs by a string: FLARE would copy all modules that it
imports, and all that these import, into the job."""

import sys
from importlib import import_module

if __name__ == "__main__":
    import_module("benchmarks.stock.site").main(*sys.argv[1:])
