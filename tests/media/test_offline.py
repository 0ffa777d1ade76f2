"""What callers of `LLM` may give as an image, a sound, a video."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from tests.media.files import sound_file, tone, video_file

from modulm.errors import RequestError
from modulm_media import Media, Sound, Video
from modulm_media.offline import as_image, as_media, as_sound, as_video, parse_media

RED = np.zeros((4, 6, 3), np.uint8)
RED[..., 0] = 200


def pixel(image):
    assert (image.mode, image.size) == ("RGB", (6, 4))
    return image.getpixel((1, 1))


@pytest.mark.parametrize(
    "value",
    [
        Image.fromarray(RED),
        RED,
        np.moveaxis(RED, -1, 0),
        (RED / 255).astype(np.float32),
        torch.from_numpy(RED),
        torch.from_numpy(RED).permute(2, 0, 1) / 255,
        Image.fromarray(RED).convert("P", palette=Image.Palette.ADAPTIVE),
    ],
    ids=["pil", "array", "channels first", "floats", "tensor", "float tensor", "palette"],
)
def test_images_of_all_kinds_become_rgb(value):
    assert pixel(as_image(value)) == (200, 0, 0)


def test_paths_are_opened(tmp_path):
    Image.fromarray(RED).save(tmp_path / "red.png")
    assert pixel(as_image(tmp_path / "red.png")) == (200, 0, 0)
    assert pixel(as_image(str(tmp_path / "red.png"))) == (200, 0, 0)
    (tmp_path / "none.png").write_bytes(b"nothing")
    for name in ("none.png", "missing.png"):
        with pytest.raises(RequestError, match="image"):
            as_image(tmp_path / name)


def test_images_are_turned_as_exif_says_and_transparency_is_white(tmp_path):
    image = Image.fromarray(np.moveaxis(RED, 0, 1))
    exif = Image.Exif()
    exif[274] = 6
    image.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    assert as_image(tmp_path / "turned.jpg").size == (6, 4)[::-1][::-1]
    clear = Image.fromarray(np.dstack([RED, np.zeros((4, 6), np.uint8)]), "RGBA")
    assert pixel(as_image(clear)) == (255, 255, 255)
    grey = as_image(np.full((4, 6), 90, np.uint8))
    assert pixel(grey) == (90, 90, 90)


@pytest.mark.parametrize(
    "value", [np.zeros((2, 2, 7), np.uint8), np.full((2, 2, 3), np.nan), np.full((2, 2, 3), 9.0),
              np.zeros((2, 2, 3), np.int64), 7, object()],
)  # fmt: skip
def test_what_is_no_image_is_refused(value):
    with pytest.raises(RequestError, match="image"):
        as_image(value)


def test_sounds(tmp_path):
    assert as_sound(np.ones(8)).rate == 16000
    sound = as_sound((np.ones((2, 8), np.float64), 8000))
    assert (sound.rate, sound.samples.shape, sound.samples.dtype) == (8000, (8,), np.float32)
    assert as_sound(np.array([-(2**15), 0, 2**14], np.int16)).samples.tolist() == [-1.0, 0.0, 0.5]
    file = sound_file(tone(0.1, 8000), 8000)
    (tmp_path / "tone.wav").write_bytes(file)
    for value in (file, tmp_path / "tone.wav", str(tmp_path / "tone.wav")):
        assert (as_sound(value).rate, len(as_sound(value).samples)) == (8000, 800)
    wrongs = (np.array([np.nan]), np.zeros(0), np.zeros((2, 2, 2)), "x", b"x",
              (np.ones(4), 0), (np.ones(4), "fast"), np.ones(4, np.uint8))  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(RequestError, match="audio"):
            as_sound(wrong)


def test_videos(tmp_path):
    frames = np.stack([RED, RED])
    for value in (frames, np.moveaxis(frames, -1, 1), [Image.fromarray(RED)] * 2, [RED, RED]):
        assert as_video(value).frames.tolist() == frames.tolist()
    assert as_video((frames, {"fps": 2.0})).fps == 2.0
    metadata = {"fps": 10, "frames_indices": [0, 9], "total_num_frames": 12}
    video = as_video((frames, metadata))
    assert (video.fps, video.indices.tolist(), video.total) == (10.0, [0, 9], 12)
    file = video_file(20)
    (tmp_path / "grey.mp4").write_bytes(file)
    for value in (file, tmp_path / "grey.mp4"):
        assert len(as_video(value).frames) == 20
    (one,) = parse_media({"video": file}, io={"video": {"num_frames": 4}})
    assert len(one.value.frames) == 4
    for wrong in ({"fps": 0}, {"frames_indices": [1]}, {"total_num_frames": 1}):
        with pytest.raises(RequestError, match="video: "):
            as_video((frames, wrong))
    with pytest.raises(RequestError, match="the same size"):
        as_video([RED, RED[:2]])


def test_one_value_or_several_by_kind_and_their_names():
    picture = Image.fromarray(RED)
    one, two = parse_media({"image": [picture, RED]})
    assert one.hash == two.hash == as_media("image", picture).hash
    (video,) = parse_media({"video": [picture, picture]})
    assert isinstance(video.value, Video)
    (sound,) = parse_media({"audio": (np.ones(4), 8000)})
    assert isinstance(sound.value, Sound)
    with_uuids = parse_media({"image": [picture, None]}, {"image": ["a", "b"]})
    assert [one.uuid for one in with_uuids] == ["a", "b"]
    assert with_uuids[0].hash == Media("image", None, "a").hash != one.hash
    for data, uuids in (
        ({"pictures": picture}, None),
        ([picture], None),
        ({"image": [picture]}, {"image": ["a", "b"]}),
        ({"image": [None]}, None),
    ):
        with pytest.raises(RequestError, match="multi_modal|None needs"):
            parse_media(data, uuids)


def test_names_of_contents_tell_them_apart():
    values = [RED, RED[:, :3], np.moveaxis(RED, 0, 1), RED + 1]
    hashes = {as_media("image", value).hash for value in values}
    hashes |= {as_media("audio", (np.ones(4), rate)).hash for rate in (8000, 16000)}
    assert len(hashes) == 6
