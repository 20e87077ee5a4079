"""Entry point of the vLLM plugin: what has to be in place before vLLM reads its configuration.

vLLM calls ``register`` once in every process it starts. It must cost nothing to users of vLLM who
do not ask for ``--quantization dps``.
"""

from dps_ray.config import DpsConfigError
from dps_ray.engine.vllm_version import require_supported_vllm

_registered = False


def register() -> None:
    """Make ``dps`` a known quantization method and hook the creation of engine configurations."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        require_supported_vllm()
    except DpsConfigError:
        _refuse_on_use()
        return
    from dps_ray.engine.configure import hook_engine_args
    from dps_ray.engine.quantization import register_quantization

    register_quantization()
    hook_engine_args()


def _refuse_on_use() -> None:
    """On an unsupported vLLM touch only the public entry, and only to name the remedy."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def create_engine_config(self, *args, **kwargs):
        if self.quantization == "dps":
            require_supported_vllm()
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config
