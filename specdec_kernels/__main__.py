"""`python -m specdec_kernels` is the command `specdec`."""

import sys

from specdec_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
