"""Find the targets that a deployment can run, from the GPU and the versions in its config."""

import re
from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement

from model.engines.tensorrt.api import version_tag
from model.errors import NoEngineForTarget
from model.loading.runtimes import tensorrt_targets
from model.loading.target import Target, gpu_product, make_torch_tag
from model.settings import RuntimeChoice
from model.store.manifest import Manifest

# truss's names that differ from the device's own name; see gpu_product. H100_40GB is a slice of a GPU.
_PRODUCTS = {"H100_40GB": "h100mig3g40gb", "RTX_PRO_6000": "rtxpro6000blackwell"}
# Compute capabilities (developer.nvidia.com/cuda-gpus). A plan can serve every GPU of one capability.
_CAPABILITIES = {
    "t4": "sm75", "a100": "sm80", "a10g": "sm86", "l4": "sm89", "l40s": "sm89", "h100": "sm90", "h100mig3g40gb": "sm90",
    "h200": "sm90", "b200": "sm100", "rtxpro6000blackwell": "sm120",
}  # fmt: skip


def pinned_version(requirements: Iterable[str], name: str) -> str | None:
    """Return the exact version that the requirements pin for a package, or None. `name`: regular expression."""
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # an option of pip
        if re.fullmatch(name, requirement.name):
            exact = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
            return exact[0] if len(exact) == 1 == len(requirement.specifier) else None
    return None


def required_targets(
    manifest: Manifest, accelerator: str, torch: str, tensorrt: str | None, runtime: RuntimeChoice
) -> list[Target]:
    """Return the targets of a release that a deployment can run, best first. There is at least one.

    `accelerator`: truss's name of the GPU, "" for a CPU. `torch`, `tensorrt`: pinned versions. Raises
    NoEngineForTarget, which names the targets of the release.
    """
    product = _PRODUCTS.get(accelerator) or gpu_product(accelerator) if accelerator else ""
    device = f"cuda-{product}-" if product else "cpu-"
    available = f"Release {manifest.name} has engines for {', '.join(manifest.targets) or 'nothing'}"
    # In reverse order, so that the highest level of x86-64 comes first.
    of_torch = [key for key in sorted(manifest.targets, reverse=True) if key.startswith(device) and "-torch" in key]
    pinned = make_torch_tag(torch, torch.partition("+")[2] if product else "")  # a CPU needs no certain build
    keys = [key for key in of_torch if re.search(rf"-{re.escape(pinned)}(-|$)", key)]
    if runtime != "aot_inductor":
        plans = _plans(manifest, product, tensorrt)
        if runtime == "tensorrt":
            if not plans:
                pin = f"tensorrt-cu13=={tensorrt}" if tensorrt else "no TensorRT"
                raise NoEngineForTarget(
                    f"The config chooses the runtime tensorrt for {accelerator or 'a CPU'} and pins {pin}. "
                    f"{available}.",
                    "Pin the TensorRT of the release under requirements, or set runtime to aot_inductor.",
                )
            return plans
        if plans:
            return [*plans, *map(parse_target, keys)]
    if not of_torch:
        raise NoEngineForTarget(
            f"The config requests {f'the GPU {accelerator}' if accelerator else 'a CPU'}. {available}.",
            "Build on that device and publish a new release, or choose another accelerator under resources.",
        )
    if not keys:
        raise NoEngineForTarget(
            f"The config pins torch=={torch}, which runs engines of {pinned}. {available}.",
            "Pin the torch of the release under requirements, or build and publish with the pinned one.",
        )
    return [parse_target(key) for key in keys]


def parse_target(key: str) -> Target:
    """Parse a key such as "cuda-h100-sm90-torch2.11-cu130" into the Target that has this key."""
    device, product, *rest = key.split("-")
    capability = rest.pop(0) if rest and rest[0].startswith("sm") else ""
    return Target(device, product, capability, "-".join(rest))


def _plans(manifest: Manifest, product: str, tensorrt: str | None) -> list[Target]:
    """Return the release's TensorRT targets that the GPU and the pinned version run, best first."""
    if tensorrt is None or product not in _CAPABILITIES:
        return []
    gpu = Target("cuda", product, _CAPABILITIES[product], "")
    return [target for target in tensorrt_targets(gpu, version_tag(tensorrt)) if target.key in manifest.targets]
