// Sound from the server: its raw samples as files that a player takes.

const HEAD = 44;

/** The bytes of base64 pieces, one after the other. */
export function joined(pieces) {
  const parts = pieces.map((piece) => Uint8Array.from(atob(piece), (letter) => letter.charCodeAt(0)));
  const bytes = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) { bytes.set(part, at); at += part.length; }
  return bytes;
}

/** A WAV file as a data URL, of samples of 16 bits in one channel. */
export async function wavUrl(samples, rate) {
  const head = new DataView(new ArrayBuffer(HEAD));
  const word = (at, text) => [...text].forEach((letter, index) => head.setUint8(at + index, letter.charCodeAt(0)));
  word(0, "RIFF"); head.setUint32(4, HEAD - 8 + samples.length, true); word(8, "WAVEfmt ");
  head.setUint32(16, 16, true); head.setUint16(20, 1, true); head.setUint16(22, 1, true);
  head.setUint32(24, rate, true); head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true); head.setUint16(34, 16, true);
  word(36, "data"); head.setUint32(40, samples.length, true);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(new Blob([head, samples], { type: "audio/wav" }));
  });
}
