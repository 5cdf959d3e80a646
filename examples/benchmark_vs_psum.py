"""Times the op against matmul and psum; takes the arguments of `python -m entwine_jax bench`."""

import sys

from entwine_jax.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
