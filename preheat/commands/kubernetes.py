"""`preheat kubernetes`: the manifests of a deployment in a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from preheat.console import ROOT

_ABOUT = """\
# {name} in the namespace {namespace}: {releases} from {store}
#   preheat kubernetes ... | kubectl apply --filename -
"""
_ABOUT_SECRETS = """\
# The values of the Secret {name}-secrets, unless pods have an identity of the cloud:
#   kubectl create secret generic {name}-secrets --namespace {namespace} {literals}
"""


def kubernetes(
    releases: Annotated[list[str], typer.Argument(help="MODEL/VERSION; MODEL/* stands for all versions.")],
    namespace: Annotated[str, typer.Option(help="The namespace of all manifests.")],
    image: Annotated[str, typer.Option(help="The image that `truss image build` made from the config.")],
    store: Annotated[
        str | None, typer.Option(help="s3:// URL, or file:// with --store-claim; default: the config's.")
    ] = None,
    store_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim that is mounted as the store's folder.")
    ] = None,
    config: Annotated[Path, typer.Option(help="The deployment's config.yaml.")] = ROOT / "config.yaml",
    name: Annotated[str, typer.Option(help="The name of all manifests.")] = "preheat",
    cache: Annotated[
        str | None,
        typer.Option(help="Where fetched blobs stay: node:/folder of the node, or claim:NAME; default: the pod."),
    ] = None,
    node_label: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE that a node must have, for example its GPU; repeatable.")
    ] = None,
    autoscaling: Annotated[Path, typer.Option(help="File of autoscaling settings.")] = ROOT
    / "truss"
    / "autoscaling"
    / "production.json",
    keda: Annotated[
        str | None, typer.Option(help="URL of Prometheus: print KEDA's ScaledObject in place of an autoscaler.")
    ] = None,
) -> None:
    """Print the Kubernetes manifests of a release: Service, Deployment, PodDisruptionBudget and autoscaler."""
    import yaml

    from preheat.kubernetes import manifests, read_pods

    pods = read_pods(
        releases,
        namespace,
        image,
        config,
        autoscaling,
        name=name,
        store=store,
        store_claim=store_claim,
        cache=cache,
        node_labels=node_label or (),
        keda=keda,
    )
    header = _ABOUT.format(name=name, namespace=namespace, releases=", ".join(releases), store=pods.settings.store)
    if secrets := sorted(pods.config.secrets or {}):
        literals = " ".join(f"--from-literal={secret}=..." for secret in secrets)
        header += _ABOUT_SECRETS.format(name=name, namespace=namespace, literals=literals)
    print(header + yaml.safe_dump_all(manifests(pods), sort_keys=False), end="")
