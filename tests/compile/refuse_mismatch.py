"""For `make test-pins`: NVVM 13.5 installed beside nvJitLink 13.0 is refused by name.

Run as ``python -m tests.compile.refuse_mismatch``; exits 1 where it is not.
"""

from __future__ import annotations

import sys
import tempfile

from nvfp4 import compile as compiler
from nvfp4.cache import Cache
from nvfp4.errors import ToolchainError

from .programs import program


def main() -> int:
    """Build once; say how that ended."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiler.build(program(), "sm_90a", cache=Cache([folder]))
        except ToolchainError as error:
            print(f"refused: {error}")
            return 0 if "nvJitLink 13.0 cannot read LTO-IR of NVVM 13." in str(error) else 1
        except Exception as error:
            print(f"not refused by name: {error!r}")
            return 1
    print("not refused: these compilers fit, or the check is broken")
    return 1


if __name__ == "__main__":
    sys.exit(main())
