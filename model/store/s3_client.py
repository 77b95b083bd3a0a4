"""Make a boto3 client from a store's options. Sends no request."""

from typing import Any

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from model.errors import StoreError
from model.store.options import StoreOptions


def connect(options: StoreOptions, connections: int) -> Any:
    """Return a boto3 client for up to `connections` threads. Raises StoreError, and boto3's errors."""
    session = boto3.Session(
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        profile_name=options.profile,
        region_name=options.region,
    )
    config = Config(
        retries={"mode": "standard", "total_max_attempts": options.attempts},
        connect_timeout=min(5.0, options.timeout),
        read_timeout=options.timeout,
        max_pool_connections=2 * connections,
        # Downloads are checked by SHA-256, uploads by Content-MD5. Many services support no newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # A custom endpoint may lack the DNS entries that bucket names in host names need.
        s3={"addressing_style": "path" if options.endpoint else "auto"},
        ignore_configured_endpoint_urls=None if options.machine_defaults else True,
    )
    region = (session.region_name if options.machine_defaults else options.region) or "us-east-1"
    try:
        return session.client("s3", endpoint_url=options.endpoint, config=config, region_name=region)
    except ValueError as error:
        raise StoreError(
            f"{options.endpoint!r} is not a valid endpoint.",
            "Give a URL with http:// or https:// and a host (AWS_ENDPOINT_URL, `endpoint` in the config).",
        ) from error
