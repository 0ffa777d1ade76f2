"""How prompts of Qwen-VL take images: their tokens count along time, height and width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modulm_media import MediaFamily, Processed

__all__ = ["QwenVLFamily"]


class QwenVLFamily(MediaFamily):
    """Qwen2-VL, 2.5 and 3."""

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        from modulm_towers.grid import grid_positions

        merge = int(self.config.get("vision_config", {}).get("spatial_merge_size", 2))
        places = []
        for first, item in items:
            inside = first + np.flatnonzero(item.embedded)
            grids = item.tensors[f"{item.kind}_grid_thw"].tolist()
            places.append((int(inside[0]), int(inside[-1]) + 1, grids))
        return grid_positions(len(tokens), places, merge)
