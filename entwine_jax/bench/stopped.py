"""What a command that measures says and returns when an exception ends it early."""

from entwine_jax.driver import WrongResultError

# A ValueError too: arguments have been checked before, so none of them is wrong.
CAUSES = (KeyboardInterrupt, WrongResultError, RuntimeError, OSError, ValueError)

INTERRUPTED = 130


def explain(cause: BaseException) -> tuple[int, str]:
    """The exit status, and what to say."""
    match cause:
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case WrongResultError():
            return 1, f"WRONG RESULT: {cause}"
    return 1, f"stopped by an error: {cause}"
