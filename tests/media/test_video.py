"""Video without torchvision: functions of ours in its place, and processors that run over them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from modulm_media.processors import takes_video
from modulm_media.video import InterpolationMode, functions, video_processor_class

pytestmark = pytest.mark.skipif(takes_video(), reason="torchvision is installed and is used")

#: What torchvision 0.28 makes of `picture()`: mode, size, dtype -> `weighed`.
RESIZED = {
    ("bilinear", (20, 28), "uint8"): (430651.0, 201563818.0),
    ("bilinear", (33, 21), "float32"): (2088.0253861024976, 1025062.7735132575),
    ("bicubic", (64, 96), "uint8"): (4719977.0, 2364053896.0),
    ("bicubic", (33, 21), "float32"): (2087.861538991332, 1024914.2430337071),
    ("lanczos", (33, 21), "uint8"): (532406.0, 261335426.0),
    ("lanczos", (20, 28), "float32"): (1687.379482999444, 789616.7270841599),
    ("nearest", (33, 21), "uint8"): (533945.0, 262403180.0),
    ("nearest-exact", (20, 28), "float32"): (1695.0000434974208, 794803.3731858246),
}

#: Video processors of transformers, and `weighed` of what they make of the frames with torchvision.
PROCESSED = {
    "Qwen2VLVideoProcessor": (515279.4922858188, 259527122.07331917),
    "Qwen3VLVideoProcessor": (2083.4510281570256, 1189414.4750295198),
    "LlavaOnevisionVideoProcessor": (692390.0235514864, 348946603.7691212),
    "LlavaNextVideoVideoProcessor": (213472.99609668273, 107621273.64564325),
    "InternVLVideoProcessor": (692390.0235514864, 348946603.7691212),
    "SmolVLMVideoProcessor": (13271.906269669533, 6629634.709677007),
    "Glm4vVideoProcessor": (7365.498602985404, 3615138.6783405514),
    "Glm46VVideoProcessor": (7365.498602985404, 3615138.6783405514),
    "VideoLlavaVideoProcessor": (213472.99609668273, 107621273.64564325),
}


def picture(dtype=torch.uint8):
    """Two frames of smooth colours with some noise, [2, 3, 40, 56]."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:40, :56]
    waves = [np.sin(rows / (3 + c)) * np.cos(columns / (4 + f)) for f in range(2) for c in range(3)]
    smooth = np.stack(waves).reshape(2, 3, 40, 56) * 90 + 128
    noisy = (smooth + rng.normal(0, 25, smooth.shape)).clip(0, 255).round()
    pixels = torch.from_numpy(noisy.astype(np.uint8))
    return pixels if dtype == torch.uint8 else pixels.to(dtype) / 255


def weighed(image):
    """(the sum of all values, and with their places modulo a prime as weights)."""
    flat = image.double().flatten()
    return flat.sum().item(), (flat * (torch.arange(len(flat)) % 1009)).sum().item()


@pytest.mark.parametrize("case", RESIZED, ids=str)
def test_frames_are_resized_as_by_torchvision(case):
    mode, size, dtype = case
    resized = functions().resize(
        picture(getattr(torch, dtype)), size, interpolation=InterpolationMode(mode), antialias=True
    )
    assert resized.dtype == getattr(torch, dtype)
    assert weighed(resized) == pytest.approx(RESIZED[case], rel=1e-6)


def test_frames_of_that_size_stay_what_they_are():
    image = picture()
    assert functions().resize(image, (40, 56)) is image


def test_a_mode_that_torch_has_not_is_refused():
    with pytest.raises(ValueError, match="hamming"):
        functions().resize(picture(), (20, 28), interpolation=InterpolationMode.HAMMING)


def test_the_rest_is_arithmetic():
    image, functional = picture(torch.float32), functions()
    normal = functional.normalize(image, [0.5, 0.25, 0.0], [0.5, 0.25, 1.0])
    torch.testing.assert_close(normal[:, 1] * 0.25 + 0.25, image[:, 1])
    wide = functional.pad(image, [1, 2, 3, 4], fill=7)
    assert wide.shape == (2, 3, 46, 60)
    assert (wide[..., 0] == 7).all()
    assert torch.equal(functional.crop(wide, 2, 1, 40, 56), image)
    grey = functional.grayscale_to_rgb(image[:, :1])
    assert grey.shape == image.shape
    assert torch.equal(grey[:, 2], image[:, 0])


def processed(name):
    """What a video processor makes of eight frames."""
    frames = np.concatenate([picture().permute(0, 2, 3, 1).numpy()] * 4)
    metadata = {"total_num_frames": 8, "fps": 4.0, "frames_indices": list(range(8))}
    outputs = video_processor_class(name)()(
        [frames], do_sample_frames=False, return_tensors="pt", video_metadata=[metadata]
    )
    return weighed(next(value for key, value in outputs.items() if key.startswith("pixel_values")))


@pytest.mark.parametrize("name", PROCESSED)
def test_a_processor_of_transformers_gives_what_it_gives_with_torchvision(name):
    assert processed(name) == pytest.approx(PROCESSED[name], rel=1e-5)


def test_what_transformers_has_no_video_processor_for_has_none():
    assert video_processor_class("NoVideoProcessor") is None


def test_nothing_stands_for_torchvision_elsewhere():
    from transformers.utils import is_torchvision_available

    video_processor_class("Qwen2VLVideoProcessor")
    assert "torchvision" not in sys.modules
    assert not is_torchvision_available()
