"""Tell whether an ICC profile of an image gives its red, green and blue other colours than sRGB does."""

from __future__ import annotations

import struct

# The colours of sRGB's red, green and blue in the profile connection space (X, Y, Z for D50), as its profiles say.
_SRGB = {b"rXYZ": (0.4361, 0.2225, 0.0139), b"gXYZ": (0.3851, 0.7169, 0.0971), b"bXYZ": (0.1431, 0.0606, 0.7141)}
_NEAR = 0.005  # largest difference of a value: programs round sRGB's colours differently
_HEADER, _ENTRY = 128, 12  # bytes before the table of tags; bytes of one of its entries
_XYZ = 8  # bytes of a tag before its numbers


def is_other(profile: bytes | None) -> bool:
    """Whether the profile is of RGB and has other primary colours than sRGB.

    Only profiles with primary colours are recognised, as cameras, phones and screens have; not tables of colours, nor
    other curves of brightness. A damaged profile counts as sRGB.
    """
    if not profile or profile[16:20] != b"RGB ":
        return False
    try:
        (count,) = struct.unpack_from(">I", profile, _HEADER)
        for i in range(min(count, len(profile) // _ENTRY)):
            name, start, _ = struct.unpack_from(">4sII", profile, _HEADER + 4 + _ENTRY * i)
            if name in _SRGB:
                found = struct.unpack_from(">3i", profile, start + _XYZ)  # in units of 2^-16
                if any(abs(v / 65536 - right) > _NEAR for v, right in zip(found, _SRGB[name], strict=True)):
                    return True
    except struct.error:
        pass
    return False
