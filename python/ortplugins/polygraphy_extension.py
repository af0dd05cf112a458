"""Polygraphy's side: an ONNX Runtime session loader with our library, and the runner ``polygraphy run --ortplugins``.

Polygraphy's own ONNX Runtime loader has no place for a custom-op library. The package's entry point in the group
``polygraphy.run.plugins`` adds the runner to ``polygraphy run`` without any change there:

    polygraphy run model.ortplugins.onnx --ortplugins
    polygraphy run model.onnx --onnxrt --save-outputs stock.json
    polygraphy run model.ortplugins.onnx --ortplugins --load-outputs stock.json
"""

from __future__ import annotations

import os

from polygraphy import util
from polygraphy.backend.base import BaseLoader
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import ModelArgs, OnnxLoadArgs, OnnxrtSessionArgs
from polygraphy.tools.args.base import BaseRunnerArgs
from polygraphy.tools.script import make_invocable


class SessionWithPlugins(BaseLoader):
    """Functor that makes an ``onnxruntime.InferenceSession`` with the ortplugins library registered.

    ``model`` is serialized bytes, a path, or a callable that returns one of them; ``providers`` are ONNX Runtime's
    names or parts of them, as in Polygraphy's ``SessionFromOnnx``; ``library`` names another build of the library.
    """

    def __init__(self, model, providers=None, library=None):
        self._model = model
        self.providers = util.default(providers, ["cpu"])
        self.library = library

    @util.check_called_by("__call__")
    def call_impl(self):
        """Returns the session."""
        from .errors import OrtPluginsError
        from .register import import_onnxruntime, register
        from .session import session_options

        model, _ = util.invoke_if_callable(self._model)
        try:
            ort = import_onnxruntime()
            available = ort.get_available_providers()
            chosen = [util.find_str_in_iterable(name, available) for name in self.providers]
            if None in chosen:
                missing = self.providers[chosen.index(None)]
                raise OrtPluginsError(f"this ONNX Runtime has no provider {missing!r}; it has {', '.join(available)}")
            options = session_options()
            register(options, library=self.library)
        except OrtPluginsError as error:
            G_LOGGER.critical(str(error))  # raises what Polygraphy's tools report without a traceback
        return ort.InferenceSession(model if isinstance(model, bytes) else os.fspath(model), options, providers=chosen)


class OrtPluginsRunnerArgs(BaseRunnerArgs):
    """
    ONNX-Runtime with ortplugins: running inference with ONNX-Runtime and the ortplugins custom-op library.

    Depends on:

        - ModelArgs
        - OnnxLoadArgs
        - OnnxrtSessionArgs
    """

    def get_name_opt_impl(self):
        return "ONNX-Runtime with ortplugins", "ortplugins"

    def get_extra_help_text_impl(self):
        return "Takes the options of --onnxrt, such as --providers."

    def add_parser_args_impl(self):
        self.group.add_argument(
            "--ortplugins-library",
            help="The custom-op library to register. Defaults to the one installed with ortplugins.",
            default=None,
        )

    def parse_impl(self, args):
        self.library = args.ortplugins_library

    def add_to_script_impl(self, script):
        loader = self.arg_groups[OnnxLoadArgs]
        if loader.must_use_onnx_loader():
            model = loader.add_to_script(script, serialize_model=True)
        else:
            model = self.arg_groups[ModelArgs].path
        script.add_import(imports=["SessionWithPlugins"], frm="ortplugins.polygraphy_extension")
        script.add_import(imports=["OnnxrtRunner"], frm="polygraphy.backend.onnxrt")
        providers = self.arg_groups[OnnxrtSessionArgs].providers
        session = script.add_loader(
            make_invocable("SessionWithPlugins", model, providers=providers, library=self.library),
            "build_ortplugins_session",
        )
        script.add_runner(make_invocable("OnnxrtRunner", session, name="ortplugins"))


def argument_groups() -> list[BaseRunnerArgs]:
    """Entry point of the group ``polygraphy.run.plugins``."""
    return [OrtPluginsRunnerArgs()]
