// Arithmetic on vectors.

const dot = (a, b) => a.reduce((sum, value, place) => sum + value * b[place], 0);
const length = (a) => Math.sqrt(dot(a, a));

/** The cosine of the angle between two vectors; 0 for one without length. */
export const cosine = (a, b) => dot(a, b) / (length(a) * length(b) || 1);

/** The cosine of each pair. */
export function similarities(vectors) {
  const unit = vectors.map((vector) => { const size = length(vector) || 1; return vector.map((value) => value / size); });
  return unit.map((a) => unit.map((b) => dot(a, b)));
}

/** Places in a plane that keep as much as a plane can of how far vectors are apart: the two first
 * principal components, by power iteration on the (small) matrix of inner products. */
export function plane(vectors) {
  const count = vectors.length;
  const mean = vectors[0].map((_, place) => vectors.reduce((sum, vector) => sum + vector[place], 0) / count);
  const centred = vectors.map((vector) => vector.map((value, place) => value - mean[place]));
  const gram = centred.map((a) => centred.map((b) => dot(a, b)));
  const axes = [component(gram, [])];
  axes.push(component(gram, axes));
  return vectors.map((_, place) => axes.map(({ vector, value }) => vector[place] * Math.sqrt(Math.max(value, 0))));
}

function component(gram, before) {
  let vector = gram.map((_, place) => Math.cos(1 + place * 1.7));
  let value = 0;
  for (let round = 0; round < 200; round += 1) {
    let next = gram.map((row) => dot(row, vector));
    for (const { vector: other } of before) {
      const share = dot(next, other);
      next = next.map((each, place) => each - share * other[place]);
    }
    value = length(next);
    if (value < 1e-12) return { vector: gram.map(() => 0), value: 0 };
    vector = next.map((each) => each / value);
  }
  return { vector, value };
}
