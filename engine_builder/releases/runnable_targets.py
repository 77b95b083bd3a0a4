"""Find the targets of a release that a deployment can run, from the GPU and the versions in its config."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from packaging.requirements import InvalidRequirement, Requirement

from engine_builder.gpus import CAPABILITIES, find_product
from model.engines.tensorrt.libraries import LIBRARIES, Library, TensorRTUnavailable
from model.errors import NoEngineForTarget
from model.loading.runtimes import runnable_plan_targets
from model.loading.target import Target, make_torch_tag
from model.settings import RuntimeChoice
from model.store.manifest import Manifest

# gpu_product cannot derive the product from these names of Truss's accelerators. H100_40GB is a MIG slice of a GPU.
_TARGET_KEY = re.compile(
    r"(?P<device>cuda|cpu)-((?P<product>\w+?)-)??((?P<capability>sm\d+)-)?(?P<runtime_tag>(torch|trt|rtx)[\w.-]+)"
)


def find_pinned_version(requirements: Iterable[str], name_pattern: str) -> str | None:
    """Return the exact version that the requirements pin for a package, or None.

    `name_pattern`: a regular expression for the whole name of the package.
    """
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # an option of pip
        if re.fullmatch(name_pattern, requirement.name):
            exact = [specifier.version for specifier in requirement.specifier if specifier.operator == "=="]
            return exact[0] if len(exact) == 1 == len(requirement.specifier) else None
    return None


def list_runnable_targets(
    manifest: Manifest,
    accelerator: str,
    torch_version: str,
    versions: Mapping[str, str | None],
    runtime: RuntimeChoice,
) -> list[Target]:
    """Return the targets of a release that a deployment can run, best first. The list has at least one target.

    `accelerator`: truss's name of the GPU, "" for a CPU. `torch_version` and `versions` are those that the config pins;
    `versions`: runtime -> version of the library of its plans, None if it is not pinned. Raises NoEngineForTarget,
    which names the targets of the release, or TensorRTUnavailable if `runtime` names a library that does not support
    the GPU, or whose version is not supported.
    """
    product = find_product(accelerator) if accelerator else ""
    if runtime in LIBRARIES:
        library = LIBRARIES[runtime]
        return _require_plan_targets(manifest, accelerator, product, library, versions[runtime])
    plan_targets: list[Target] = []
    if runtime == "fastest":
        for library in LIBRARIES.values():
            with suppress(TensorRTUnavailable):  # a server with this library serves other engines
                plan_targets += _find_plan_targets(manifest, product, library, versions[library.runtime])
    try:
        return plan_targets + _require_torch_targets(manifest, accelerator, product, torch_version)
    except NoEngineForTarget:
        if plan_targets:
            return plan_targets
        raise


def parse_target(key: str) -> Target | None:
    """Return the Target with this key, or None if the text is not a target's key.

    Examples are "cuda-h100-sm90-torch2.11-cu130", "cuda-sm90-trt11.4" and "cpu-x86_64_v3-torch2.13".
    """
    match = _TARGET_KEY.fullmatch(key)
    if match is None:
        return None
    return Target(match["device"], match["product"] or "", match["capability"] or "", match["runtime_tag"])


def _require_torch_targets(manifest: Manifest, accelerator: str, product: str, torch_version: str) -> list[Target]:
    """Return the AOTInductor targets of the release for the device and torch version. Raises NoEngineForTarget.

    `product`: the GPU's, "" for a CPU. For a CPU, the target of the highest x86-64 level comes first.
    """
    parsed = [parse_target(key) for key in sorted(manifest.targets, reverse=True)]
    of_device = [
        target
        for target in parsed
        if target is not None
        and target.runtime_tag.startswith("torch")
        and (target.device == "cuda" and target.product == product if product else target.device == "cpu")
    ]
    if not of_device:
        raise NoEngineForTarget(
            f"The config requests {f'the GPU {accelerator}' if accelerator else 'a CPU'}. {_name_targets(manifest)}.",
            "Build on that device and publish a new release, or choose another accelerator under resources.",
        )
    # A CPU engine runs with every build of a torch version, for example +cpu and +cu130.
    tag = make_torch_tag(torch_version, torch_version.partition("+")[2] if product else "")
    of_version = [target for target in of_device if f"{target.runtime_tag}-".startswith(f"{tag}-")]
    if not of_version:
        raise NoEngineForTarget(
            f"The config pins torch=={torch_version}, which runs engines of {tag}. {_name_targets(manifest)}.",
            "Pin the torch of the release under requirements, or build and publish with the pinned one.",
        )
    return of_version


def _require_plan_targets(
    manifest: Manifest, accelerator: str, product: str, library: Library, version: str | None
) -> list[Target]:
    """Return the targets of the release whose plans the GPU and the library's version run, best first.

    Raises NoEngineForTarget or TensorRTUnavailable.
    """
    if product not in CAPABILITIES:
        device = f"{accelerator}, whose compute capability is not known" if accelerator else "a CPU"
        raise NoEngineForTarget(
            f"The config chooses the runtime {library.runtime} for {device}. {_name_targets(manifest)}.",
            "Set runtime to aot_inductor, or choose another accelerator under resources.",
        )
    targets = _find_plan_targets(manifest, product, library, version)
    if not targets:
        package = library.distributions[-1] if library.compiles_on_target else "tensorrt-cu13"
        pin = f"{package}=={version}" if version else f"no {library.title}"
        raise NoEngineForTarget(
            f"The config chooses the runtime {library.runtime} for {accelerator} and pins {pin}. "
            f"{_name_targets(manifest)}.",
            f"Pin the {library.title} of the release under requirements, or set runtime to aot_inductor.",
        )
    return targets


def _find_plan_targets(manifest: Manifest, product: str, library: Library, version: str | None) -> list[Target]:
    """Return the targets of the release whose plans the GPU and the library's version run, best first, or [].

    Raises TensorRTUnavailable for a GPU or a version that is not supported.
    """
    if version is None or product not in CAPABILITIES:
        return []
    gpu = Target("cuda", product, CAPABILITIES[product], "")
    targets = runnable_plan_targets(library, gpu, library.version_tag(version))
    return [target for target in targets if target.key in manifest.targets]


def _name_targets(manifest: Manifest) -> str:
    """Return a sentence that names the targets of the release, without its full stop."""
    return f"Release {manifest.name} has engines for {', '.join(manifest.targets) or 'nothing'}"
