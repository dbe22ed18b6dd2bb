"""Files that are called images, as a stranger may put them into a data set."""

import gzip
import io
import pickle
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image, ImageCms, PngImagePlugin

__all__ = ["Hostile", "hostile_images"]

Fate = Literal["refused", "trained", "either"]
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
BOMBS = ((60_000, 60_000), (50_001, 1_000), (16_000, 16_000))


@dataclass(frozen=True)
class Hostile:
    """A file.

    Attributes:
        name: of the file, unique.
        content: its bytes.
        fate: what must become of it; either: as Pillow decides.
        bomb: whether it must not be decoded, because that would take all memory.
    """

    name: str
    content: bytes
    fate: Fate = "either"
    bomb: bool = False


def hostile_images() -> list[Hostile]:
    """Return the files."""
    kinds = (_bombs, _truncated, _others, _animated, _modes, _turned, _empty, _flipped, _extreme)
    return [one for kind in (*kinds, _metadata) for one in kind()]


def plain(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    draw = random.Random(width * height)
    image = Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
    return image if mode == "RGB" else image.convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(width: int, height: int, *more: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [_chunk(b"IHDR", header), *more, _chunk(b"IDAT", zlib.compress(bytes(64)))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + _chunk(b"IEND", b"")


def _sized(kind: str, width: int, height: int) -> bytes:
    """Return a small file whose header says another size."""
    content = bytearray(saved(plain(), kind))
    if kind == "PNG":
        return _png(width, height)
    if kind == "JPEG":
        at = content.index(b"\xff\xc0")
        content[at + 5 : at + 9] = struct.pack(">HH", height % 65536, width % 65536)
    if kind == "GIF":
        content[6:10] = struct.pack("<HH", width % 65536, height % 65536)
    if kind == "BMP":
        content[18:26] = struct.pack("<ii", width, height)
    if kind == "WEBP":
        bits = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
        body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + bits + bytes(content[12:])
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    if kind == "PPM":
        return f"P6 {width} {height} 255\n".encode() + bytes(48)
    if kind == "TIFF":
        for tag, value in ((256, width), (257, height)):
            at = content.index(struct.pack("<HHI", tag, 4, 1))
            content[at + 8 : at + 12] = struct.pack("<I", value)
    return bytes(content)


def _bombs() -> Iterator[Hostile]:
    for kind in FORMATS:
        for width, height in BOMBS:
            name = f"bomb_{width}x{height}.{kind.lower()}"
            yield Hostile(name, _sized(kind, width, height), "refused", bomb=True)
    black = Image.new("L", (7_200, 7_200))
    yield Hostile("bomb_black.png", saved(black, "PNG"), "refused", bomb=True)
    yield Hostile("bomb_pages.gif", saved(Image.new("L", (8_000, 8_000)), "GIF"), "refused", True)
    yield Hostile("largest.png", saved(Image.new("L", (7_000, 7_000)), "PNG"), "trained")


def _truncated() -> Iterator[Hostile]:
    for kind in FORMATS:
        content = saved(plain(64, 64), kind)
        for share in (1, 10, 40, 70, 95):
            cut = content[: len(content) * share // 100]
            yield Hostile(f"cut_{share}.{kind.lower()}", cut)


def _others() -> Iterator[Hostile]:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/tmp/eps-was-run) (w) file\n"
    harmful = b"cposix\nsystem\n(S'touch /tmp/pickle-was-run'\ntR."
    contents: dict[str, bytes] = {
        "text.png": b"this is a text\n" * 9,
        "page.jpg": b"<html><img src='x.png'></html>",
        "drawing.png": b"<svg xmlns='http://www.w3.org/2000/svg'><script>x()</script></svg>",
        "script.png": script,
        "document.png": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
        "archive.png": b"PK\x03\x04" + bytes(60),
        "nothing.png": b"",
        "program.png": b"\x7fELF\x02\x01\x01" + bytes(64),
        "shell.png": b"#!/bin/sh\ntouch /tmp/shell-was-run\n",
        "pickle.png": harmful,
        "object.png": pickle.dumps([1, 2]),
        "packed.png": gzip.compress(saved(plain(), "PNG")),
        "zeros.png": bytes(4096),
        "noise.png": random.Random(3).randbytes(4096),
        "signature.png": b"\x89PNG\r\n\x1a\n",
        "signature.jpg": b"\xff\xd8\xff",
        "signature.webp": b"RIFF\x10\x00\x00\x00WEBPVP8X",
        "icon.ico": b"\x00\x00\x01\x00\x01\x00" + bytes(40),
        "array.npy": b"\x93NUMPY\x01\x00" + bytes(40),
        "film.mp4": b"\x00\x00\x00\x18ftypmp42" + bytes(40),
    }
    for name, content in contents.items():
        yield Hostile(f"other_{name}", content, "refused")


def _animated() -> Iterator[Hostile]:
    frames = [plain(20, 12), plain(20, 12).rotate(180), Image.new("RGB", (20, 12))]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        moving = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        yield Hostile(f"moving.{kind.lower()}", moving, "trained")
        yield Hostile(f"moving_cut.{kind.lower()}", moving[: len(moving) // 2])


def _modes() -> Iterator[Hostile]:
    grey16 = Image.frombytes("I;16", (8, 4), bytes(range(64)))
    images = {
        "cmyk.jpg": ("JPEG", plain(mode="CMYK"), {}),
        "cmyk.tiff": ("TIFF", plain(mode="CMYK"), {}),
        "grey16.png": ("PNG", grey16, {}),
        "grey16.tiff": ("TIFF", grey16, {}),
        "whole.tiff": ("TIFF", plain(mode="I"), {}),
        "float.tiff": ("TIFF", plain(mode="F"), {}),
        "lab.tiff": ("TIFF", _lab(), {}),
        "bits.png": ("PNG", plain(mode="1"), {}),
        "bits.tiff": ("TIFF", plain(mode="1"), {"compression": "group4"}),
        "palette.png": ("PNG", plain(mode="P"), {}),
        "palette_clear.png": ("PNG", plain(mode="P"), {"transparency": 3}),
        "palette.gif": ("GIF", plain(mode="P"), {"transparency": 1}),
        "grey.png": ("PNG", plain(mode="L"), {}),
        "grey.jpg": ("JPEG", plain(mode="L"), {}),
        "grey_alpha.png": ("PNG", plain(mode="LA"), {}),
        "alpha.png": ("PNG", plain(mode="RGBA"), {}),
        "alpha.webp": ("WEBP", plain(mode="RGBA"), {"lossless": True}),
        "alpha.tiff": ("TIFF", plain(mode="RGBA"), {}),
        "clear.png": ("PNG", Image.new("RGBA", (9, 9), (200, 10, 10, 0)), {}),
        "progressive.jpg": ("JPEG", plain(), {"progressive": True}),
        "lzw.tiff": ("TIFF", plain(), {"compression": "tiff_lzw"}),
        "jpeg.tiff": ("TIFF", plain(), {"compression": "jpeg"}),
    }
    for name, (kind, image, options) in images.items():
        yield Hostile(f"mode_{name}", saved(image, kind, **options))


def _lab() -> Image.Image:
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    transform = ImageCms.buildTransform(*profiles, "RGB", "LAB")
    return ImageCms.applyTransform(plain(), transform) or plain()


def _turned() -> Iterator[Hostile]:
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        for orientation in (1, 2, 3, 4, 5, 6, 7, 8, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            content = saved(plain(), kind, exif=exif)
            yield Hostile(f"turned_{orientation}.{kind.lower()}", content, "trained")


def _empty() -> Iterator[Hostile]:
    for kind in FORMATS:
        if kind == "WEBP":  # its header holds the size less one
            continue
        for width, height in ((0, 16), (16, 0)):
            name = f"empty_{width}x{height}.{kind.lower()}"
            yield Hostile(name, _sized(kind, width, height))


def _flipped() -> Iterator[Hostile]:
    for kind in FORMATS:
        content = saved(plain(32, 32), kind)
        for seed in range(6):
            draw = random.Random(seed)
            changed = bytearray(content)
            for _ in range(1 + seed):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            yield Hostile(f"flipped_{seed}.{kind.lower()}", bytes(changed))


def _extreme() -> Iterator[Hostile]:
    for width, height in ((1, 1), (1, 400), (400, 1), (2, 3), (3_000, 2)):
        yield Hostile(f"extreme_{width}x{height}.png", saved(plain(width, height), "PNG"))
    yield Hostile("extreme_comment.jpg", saved(plain(), "JPEG", comment=b"x" * 60_000))


def _metadata() -> Iterator[Hostile]:
    info = PngImagePlugin.PngInfo()
    info.add_text("note", "0" * (40 << 20), zip=True)
    yield Hostile("metadata_text.png", saved(plain(), "PNG", pnginfo=info))
    profile = _chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(80 << 20)))
    yield Hostile("metadata_profile.png", _png(4, 4, profile))
    yield Hostile("metadata_exif.jpg", saved(plain(), "JPEG", exif=b"Exif\0\0" + b"\xff" * 400))
    exif = Image.Exif()
    exif[0x0112] = 200
    yield Hostile("metadata_orientation.png", saved(plain(), "PNG", exif=exif))
