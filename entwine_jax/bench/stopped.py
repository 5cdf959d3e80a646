"""What a command that measures says and returns where an exception ends it; what it has is kept."""

from entwine_jax.bench.measure import WrongResultError
from entwine_jax.trace.record import CannotTraceError

# A ValueError too: what was asked for has been checked before.
CAUSES = (KeyboardInterrupt, WrongResultError, RuntimeError, OSError, ValueError)

INTERRUPTED = 130


def explain(cause: BaseException) -> tuple[int, str]:
    """The exit status, and what to say."""
    match cause:
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case WrongResultError() | CannotTraceError():
            return 1, f"WRONG RESULT: {cause}"
    return 1, f"stopped by an error: {cause}"
