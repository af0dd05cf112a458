"""The errors that a user of the package can mend: a wrong file, a wrong option, a runtime that does not fit."""

from __future__ import annotations


class OrtPluginsError(Exception):
    """A problem with what was given to the package; the message is one sentence that says what and how to mend it."""


class RuntimeMismatchError(OrtPluginsError, ImportError):
    """ONNX Runtime is missing, or its version is one that the library does not run on."""


class LibraryNotFoundError(OrtPluginsError, FileNotFoundError):
    """The custom-op library is not where the package looks for it."""
