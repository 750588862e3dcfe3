//! Base-3 codes of the wide-row layouts, placed and coded for wide vectors.
//!
//! `wide-row-b3`: 128 weights of a row in 26 bytes, as in PTQ1_0. Bytes 0 to 23 hold five weights each and make six 32-bit words: byte
//! i of word c holds the weights k = 20c + 4s + i for s = 0 to 4. Bytes 24 and 25 hold four weights each in two-bit slots: with the low
//! half of their 16 bits and the same shifted up by 12, byte i of a 32-bit lane has weight 120 + i in slot 0 and weight 124 + i in slot 1.
//!
//! `wide-row-b3x5`: 640 weights of a row, [`FIVE`] groups of 128 that each have a scale, in 128 bytes of five weights each, 1.6 bits a
//! weight. Byte k holds weight k of every group: what is at place s of a byte belongs to group s, so that the sums of a place, which
//! kernels keep apart in any case, are those of a group. Byte i of word c is byte 4c + i.
//!
//! The code of a byte of five weights depends on what the vector width can look up:
//! * [`TileRows::R8`]: the number `t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4`, to be peeled by comparisons.
//! * [`TileRows::R16`]: for one table of 64 bytes (`vpermb`), which reads the low six bits of an index. With
//!   `r = t0 + 3 t1 + 9 t2 + 27 t3`, a byte is `64 t4 + r` where r is below 64, so that t4 stands as it is in the two bits that
//!   the table ignores; the other 51 codes are `192 + 3 (r - 64) + t4`. All 243 fit.

use super::TileRows;

/// Bytes of 128 codes.
pub const BYTES: usize = 26;

/// Blocks of a tile whose codes, then scales, stand together: 448 bytes of 16 rows are whole cache lines.
pub const UNIT: usize = 1;

/// Groups of 128 weights that share bytes in `wide-row-b3x5`.
pub const FIVE: usize = 5;

/// Bytes of the codes of five groups.
pub const FIVE_BYTES: usize = 128;

/// As [`UNIT`] for five groups: twice 2208 bytes of 16 rows are whole cache lines.
pub const FIVE_UNIT: usize = 2;

/// Where byte `j` of the words of row `r` stands among those of a tile of `rows` rows and one block: words of a row side by side.
pub const fn place_in_words(rows: usize, r: usize, j: usize) -> usize {
    (j / 4 * rows + r) * 4 + j % 4
}

/// As [`place_in_words`] for the bytes of 128 codes: the last two of each row come after the words.
pub const fn place(rows: usize, r: usize, j: usize) -> usize {
    if j < 24 {
        place_in_words(rows, r, j)
    } else {
        24 * rows + 2 * r + (j - 24)
    }
}

/// The byte of five codes 0 to 2.
pub const fn encode(rows: TileRows, t: [u8; 5]) -> u8 {
    let r = t[0] + 3 * t[1] + 9 * t[2] + 27 * t[3];
    match rows {
        TileRows::R8 => r + 81 * t[4],
        TileRows::R16 if r < 64 => 64 * t[4] + r,
        TileRows::R16 => 192 + 3 * (r - 64) + t[4],
    }
}

/// The inverse of [`encode`]; a byte that no five codes have gives some codes 0 to 2.
pub const fn decode(rows: TileRows, byte: u8) -> [u8; 5] {
    let (r, t4) = match (rows, byte) {
        (TileRows::R8, _) => (byte % 81, byte / 81),
        (TileRows::R16, 192..) => (64 + (byte - 192) / 3, (byte - 192) % 3),
        (TileRows::R16, _) => (byte % 64, byte / 64),
    };
    [
        r % 3,
        r / 3 % 3,
        r / 9 % 3,
        r / 27 % 3,
        if t4 > 2 { 2 } else { t4 },
    ]
}

/// The weight in slot s of the two last bytes, `[byte][slot]`.
const LAST: [[usize; 4]; 2] = [[120, 124, 122, 126], [121, 125, 123, 127]];

/// 128 codes 0 to 2, in order of k, as the bytes of one row.
pub fn pack(rows: TileRows, codes: &[u8; 128]) -> [u8; BYTES] {
    std::array::from_fn(|j| match j.checked_sub(24) {
        None => encode(
            rows,
            std::array::from_fn(|s| codes[20 * (j / 4) + 4 * s + j % 4]),
        ),
        Some(last) => (0..4).map(|s| codes[LAST[last][s]] << (2 * s)).sum(),
    })
}

/// The inverse of [`pack`].
pub fn unpack(rows: TileRows, bytes: &[u8; BYTES]) -> [u8; 128] {
    let mut codes = [0; 128];
    for (j, &byte) in bytes[..24].iter().enumerate() {
        for (s, code) in decode(rows, byte).into_iter().enumerate() {
            codes[20 * (j / 4) + 4 * s + j % 4] = code;
        }
    }
    for (places, byte) in LAST.iter().zip(&bytes[24..]) {
        for (s, &k) in places.iter().enumerate() {
            codes[k] = byte >> (2 * s) & 3;
        }
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn five(n: u8) -> [u8; 5] {
        [n % 3, n / 3 % 3, n / 9 % 3, n / 27 % 3, n / 81]
    }

    #[test]
    fn every_five_codes_have_a_byte_of_their_own() {
        for rows in [TileRows::R8, TileRows::R16] {
            let mut seen = [false; 256];
            for n in 0..243 {
                let byte = encode(rows, five(n));
                assert!(
                    !std::mem::replace(&mut seen[byte as usize], true),
                    "{rows:?} byte {byte}"
                );
                assert_eq!(decode(rows, byte), five(n), "{rows:?} byte {byte}");
            }
        }
    }

    #[test]
    fn each_weight_and_each_byte_has_one_place() {
        for rows in [TileRows::R8, TileRows::R16] {
            for k in 0..128 {
                let codes = std::array::from_fn(|i| if i == k { 2 } else { 0 });
                assert_eq!(
                    unpack(rows, &pack(rows, &codes)),
                    codes,
                    "{rows:?} weight {k}"
                );
            }
            let n = rows as usize;
            let mut places: Vec<_> = (0..n)
                .flat_map(|r| (0..BYTES).map(move |j| place(n, r, j)))
                .collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..n * BYTES));
        }
    }
}
