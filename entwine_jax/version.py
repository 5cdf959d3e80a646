"""The version: the package, its metadata and the compiled module all take it from here."""

__version__ = "0.1.0"

# Of the custom calls, in their names: a change of operands or attributes raises it, so that
# programs serialised before are refused by name. ffi/handlers/handlers.cc has the same number.
CALL_VERSION = 4
