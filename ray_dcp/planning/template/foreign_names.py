"""Names in files of other libraries, which a template has otherwise: Hugging Face has no name for the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.planning.template.stored_names import NameChoice, SeenNames, seen_names


def matched_names(seen: SeenNames, metadata: Metadata, choice: NameChoice, flat: Mapping[str, Any]) -> SeenNames:
    """``seen`` as the template ``flat`` names it, whose values lie below one key: ``{"model": model}``.

    Where more names are found without that key, stored names get it.
    """
    tops = {fqn.partition(".")[0] for fqn in flat}
    prefix = f"{next(iter(tops))}." if len(tops) == 1 else ""
    saved = metadata.state_dict_metadata
    without = sum(fqn.removeprefix(prefix) in saved for fqn in flat if fqn.startswith(prefix))
    if prefix and not choice.renames and without > sum(fqn in seen.metadata.state_dict_metadata for fqn in flat):
        seen = seen_names(metadata, NameChoice(list(choice.only) or None, list(choice.skip), lambda fqn: prefix + fqn))
    return seen
