"""Files of images, sound and video: right, or refused with words for who sent them."""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from tests.media.files import image_file, shade, sound_file, tone, video_file

from modulm_media.decode import decode
from modulm_media.limits import LIMITS, Limits, Undecodable
from modulm_media.video_files import sampled_frames

RED = Image.new("RGB", (6, 4), (200, 0, 0))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animated() -> bytes:
    others = [Image.new("RGB", (6, 4), (frame % 256, 9, 9)) for frame in range(50)]
    return image_file(RED, "GIF", save_all=True, append_images=others)


def clear_palette() -> bytes:
    image = Image.new("P", (6, 4), 1)
    image.putpalette([0, 0, 255, 200, 0, 0])
    image.putpixel((0, 0), 0)
    return image_file(image, "PNG", transparency=0)


def turned() -> bytes:
    exif = Image.Exif()
    exif[274] = 6
    image = Image.new("RGB", (4, 6), (200, 0, 0))
    return image_file(image, "JPEG", exif=exif, quality=95)


def test_damaged_files_are_decoded_or_refused(rng, rounds):
    """Whatever the damage: a value within the limits, or Undecodable."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 12, 3), np.uint8))
    whole = [("image", image_file(noise, form)) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    whole += [("audio", sound_file(tone(0.05), 8000, form)) for form in ("WAV", "FLAC", "OGG")]
    limits, seen = Limits(pixels=1 << 16, seconds=60.0), Counter()
    for _ in range(240 * rounds):
        kind, data = rng.choice(whole)
        content = bytearray(data)
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(min(len(content), rng.choice((64, len(content)))))
            content[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        try:
            value = decode(kind, bytes(content), {}, limits)
        except Undecodable:
            seen["refused"] += 1
            continue
        seen[kind] += 1
        assert kind == "audio" or (value.mode == "RGB" and value.width * value.height <= 1 << 16)
        assert kind == "image" or np.isfinite(value.samples).all()
    assert min(seen["refused"], seen["image"], seen["audio"]) > 5


def test_sound_without_a_decoder_is_refused():
    """Found by `make fuzz`: a format of sound that no decoder knows."""
    sound = bytearray(sound_file(tone(0.05), 8000, "WAV"))
    sound[20:24] = b"\x01\x14\x18\x00"
    with pytest.raises(Undecodable, match="no decoder for its sound"):
        decode("audio", bytes(sound), {})


@pytest.mark.parametrize(
    "data",
    [
        image_file(RED),
        image_file(RED, "JPEG", quality=98),
        image_file(RED, "WEBP", lossless=True),
        image_file(RED, "BMP"),
        image_file(RED.convert("P"), "GIF"),
        image_file(RED.convert("CMYK"), "JPEG", quality=98),
        image_file(RED.convert("RGBA")),
        image_file(RED) + b"<html>something else</html>",
        png(6, 4, 16, 2, (b"\0" + struct.pack(">HHH", 200 << 8, 0, 0) * 6) * 4),
        animated(),
        clear_palette(),
        turned(),
    ],
    ids=["png", "jpeg", "webp", "bmp", "gif", "cmyk", "rgba", "polyglot", "16 bit", "animated",
         "palette with transparency", "exif"],
)  # fmt: skip
def test_images(data):
    image = decode("image", data, {})
    assert (image.mode, image.size) == ("RGB", (6, 4))
    assert np.abs(np.array(image.getpixel((3, 2))) - (200, 0, 0)).max() <= 8


def test_grey_of_16_bits_is_not_cut_and_what_is_clear_shows_what_is_asked_for():
    grey = png(2, 1, 16, 0, b"\0" + struct.pack(">HH", 0x4000, 0xFFFF))
    assert np.asarray(decode("image", grey, {}))[0, :, 0].tolist() == [0x40, 0xFF]
    assert decode("image", clear_palette(), {}).getpixel((0, 0)) == (255, 255, 255)
    green = {"rgba_background_color": [0, 255, 0]}
    assert decode("image", clear_palette(), green).getpixel((0, 0)) == (0, 255, 0)


def test_shapes_of_images():
    for size in ((1, 1), (1, 20000), (20000, 1)):
        assert decode("image", image_file(Image.new("RGB", size)), {}).size == size


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"nothing", "not an image"),
        (image_file(RED, "JPEG")[:-80], "[Tt]runcated"),
        (image_file(Image.effect_noise((80, 80), 90))[:3000], "[Tt]runcated"),
        (image_file(RED, "TIFF"), "not an image"),
        (image_file(RED, "EPS"), "not an image"),
        (image_file(RED, "JPEG2000"), "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (png(50000, 50000, 1, 0, b"\0"), "at most|decompression bomb"),
        (png(60, 60, 8, 2, b"\0\1"), "decoded"),
        (sound_file(tone()), "not an image"),
    ],
    ids=["empty", "text", "cut jpeg", "cut png", "tiff", "eps", "jpeg 2000", "svg", "bomb",
         "too few pixels", "sound"],
)  # fmt: skip
def test_what_is_no_image_is_refused(data, message):
    most = Image.MAX_IMAGE_PIXELS
    with pytest.raises(Undecodable, match=message) as caught:
        decode("image", data, {})
    assert "0x" not in str(caught.value)
    assert "<" not in str(caught.value)
    assert most == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    ("form", "kind"),
    [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "PCM_24"), ("FLAC", None), ("OGG", "VORBIS"),
     ("OGG", "OPUS"), ("MP3", None), ("AIFF", None)],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 2])
def test_sounds(form, kind, channels):
    sound = decode("audio", sound_file(tone(channels=channels), 16000, form, kind), {})
    assert sound.rate == 16000
    assert sound.samples.dtype == np.float32
    assert abs(len(sound.samples) - 8000) < 1200
    power = np.abs(np.fft.rfft(sound.samples[:8000] * np.hanning(8000)))
    assert abs(int(power.argmax()) * 2 - 440) <= 4


def test_sound_in_containers_of_video_and_at_another_rate():
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(0.5, 48000)[None], format="flt", layout="mono")
        frame.rate = 48000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert decode("audio", buffer.getvalue(), {}).rate == 48000
    sound = decode("audio", buffer.getvalue(), {"rate": 16000})
    assert sound.rate == 16000
    assert abs(len(sound.samples) - 8000) < 800
    whole = decode("audio", sound_file(tone(rate=44100), 44100, kind="FLOAT"), {})
    pieces = decode("audio", sound_file(tone(rate=44100), 44100, kind="FLOAT"), {"rate": 16000})
    assert np.abs(whole.at(16000).samples - pieces.samples).max() < 1e-4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nothing at all", "cannot be decoded"),
        (sound_file(np.array([0, np.nan, 0], np.float32), kind="FLOAT"), "not all finite"),
        (sound_file(np.array([0, np.inf, 0], np.float32), kind="FLOAT"), "not all finite"),
        (sound_file(np.zeros(0, np.float32)), "no audio|cannot be decoded"),
        (sound_file(tone(3.0), form="OGG", kind="OPUS"), "more than 2 seconds"),
        (video_file(3), "no audio"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", "cannot be"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "cannot be"),
    ],
    ids=["text", "nan", "infinity", "silence", "long", "video", "hls", "concat"],
)
def test_what_is_no_sound_is_refused(data, message):
    with pytest.raises(Undecodable, match=message):
        decode("audio", data, {}, Limits(seconds=2))


@pytest.mark.parametrize(
    ("form", "codec", "options"),
    [("mp4", "mpeg4", {"g": "4"}), ("mp4", "libx264", {"bf": "2", "g": "6"}),
     ("matroska", "libx264", {}), ("webm", "libvpx-vp9", {"cpu-used": "8"}),
     ("avi", "mpeg4", {}), ("mpegts", "mpeg2video", {"bf": "2", "g": "5"})],
)  # fmt: skip
@pytest.mark.parametrize("io", [{"num_frames": 5}, {"num_frames": -1}, {"fps": 2}, {}])
def test_videos(form, codec, options, io):
    rate = 25 if codec == "mpeg2video" else 10
    video = decode("video", video_file(20, rate=rate, form=form, codec=codec, **options), io)
    frame_indices = sampled_frames(20, video.fps, io)
    assert (video.fps, video.total) == (rate, 20)
    assert video.indices.tolist() == frame_indices.tolist()
    assert video.frames.shape == (len(frame_indices), 48, 64, 3)
    greys = video.frames[:, 24, 32].mean(-1)
    assert np.abs(greys - [shade(frame_number) for frame_number in frame_indices]).max() < 9


def test_frames_are_spread_evenly():
    assert sampled_frames(10, 5.0, {"num_frames": 3}).tolist() == [0, 4, 9]
    assert sampled_frames(10, 5.0, {"num_frames": 99}).tolist() == list(range(10))
    assert sampled_frames(10, 5.0, {"fps": 1}).tolist() == [0, 9]
    assert sampled_frames(10, 5.0, {"fps": 0.1}).tolist() == [0]
    assert len(sampled_frames(100_000, 25.0, {})) == 32


def test_frames_that_need_too_much_room_are_made_smaller():
    video = decode("video", video_file(8), {}, Limits(room=8 * 32 * 24 * 3))
    assert video.frames.shape == (8, 24, 32, 3)


@pytest.mark.parametrize(
    ("data", "io", "limits", "message"),
    [
        (b"nothing", {}, LIMITS, "cannot be decoded"),
        (video_file(6)[:-600], {}, LIMITS, "cannot be decoded|ends before|no frames|no video"),
        (video_file(20), {"num_frames": -1}, Limits(frames=10), "limit 10"),
        (video_file(2), {}, Limits(pixels=100), "at most 100 pixels"),
        (sound_file(tone()), {}, LIMITS, "no video"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", {}, LIMITS, "can"),
    ],
    ids=["text", "cut", "many frames", "large", "sound", "hls"],
)
def test_what_is_no_video_is_refused(data, io, limits, message):
    with pytest.raises(Undecodable, match=message):
        decode("video", data, io, limits)


def test_animations_are_videos_too():
    frames = [Image.new("L", (8, 8), shade(frame_number)) for frame_number in range(12)]
    data = image_file(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
    video = decode("video", data, {"num_frames": 3})
    assert video.indices.tolist() == [0, 5, 11]
    assert video.total == 12
    greys = video.frames[:, 4, 4].mean(-1)
    assert np.abs(greys - [shade(frame_number) for frame_number in (0, 5, 11)]).max() < 9


def test_values_say_what_transformers_asks():
    video = decode("video", video_file(20), {"num_frames": 5})
    metadata = video.metadata()
    assert (metadata["fps"], metadata["total_num_frames"], metadata["duration"]) == (10.0, 20, 2.0)
    assert (metadata["width"], metadata["height"]) == (64, 48)
    assert metadata["frames_indices"] == [0, 4, 9, 14, 19]
    assert video.seconds().tolist() == [0.0, 0.4, 0.9, 1.4, 1.9]
    assert decode("audio", sound_file(tone(0.25)), {}).seconds == 0.25
