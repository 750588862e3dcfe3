use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::formats::Format;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../models")
        .join(name)
}

fn nano() -> Vec<u8> {
    std::fs::read(model("tern-nano-pq2_0.gguf")).unwrap()
}

/// The error of a file that must be refused: one line, with the file's name.
fn refused(bytes: &[u8]) -> String {
    let error = Gguf::from_bytes("bad.gguf", bytes).expect_err("a bad file was read");
    let line = format!("{error:#}");
    assert!(line.starts_with("bad.gguf: "), "{line}");
    assert!(!line.contains('\n') && line.len() < 700, "{line}");
    line
}

/// A small file, built by hand so that each field can be wrong.
struct Raw {
    magic: [u8; 4],
    version: u32,
    tensors: u64,
    keys: u64,
    body: Vec<u8>,
}

impl Raw {
    fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensors: 0,
            keys: 0,
            body: Vec::new(),
        }
    }

    fn string(mut self, text: &[u8]) -> Self {
        self.body.extend((text.len() as u64).to_le_bytes());
        self.body.extend(text);
        self
    }

    fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.keys += 1;
        let mut new = self.string(name.as_bytes());
        new.body.extend(kind.to_le_bytes());
        new.body.extend(value);
        new
    }

    fn tensor(mut self, name: &str, dims: &[u64], id: u32, offset: u64) -> Self {
        self.tensors += 1;
        let mut new = self.string(name.as_bytes());
        new.body.extend((dims.len() as u32).to_le_bytes());
        for d in dims {
            new.body.extend(d.to_le_bytes());
        }
        new.body.extend(id.to_le_bytes());
        new.body.extend(offset.to_le_bytes());
        new
    }

    /// The file with `data` zeros in the data section.
    fn data(&self, data: usize) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensors.to_le_bytes());
        bytes.extend(self.keys.to_le_bytes());
        bytes.extend(&self.body);
        bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
        bytes
    }
}

#[test]
fn nano_files() {
    for (name, format) in [
        ("tern-nano-pq2_0.gguf", Format::Pq2_0),
        ("tern-nano-ptq1_0.gguf", Format::Ptq1_0),
    ] {
        let gguf = Gguf::open(&model(name)).unwrap();
        assert_eq!((gguf.keys().len(), gguf.tensors().len()), (42, 56));
        assert_eq!(gguf.str("general.architecture").unwrap(), "qwen35");
        assert_eq!(gguf.u32("qwen35.block_count").unwrap(), 4);
        assert_eq!(gguf.f32("qwen35.rope.freq_base").unwrap(), 1e4);
        assert!(
            gguf.key("prism.hadamard.gdn_v_grouped")
                .unwrap()
                .bool()
                .unwrap()
        );
        let tokens = gguf.key("tokenizer.ggml.tokens").unwrap().strs().unwrap();
        assert_eq!((tokens.len(), tokens[0]), (2048, "!"));
        let signs = gguf.key("prism.hadamard.sign_values").unwrap();
        assert_eq!(signs.i32s().unwrap()[..4], [-1, 1, -1, 1]);
        assert_eq!(signs.f32s().unwrap()[..4], [-1.0, 1.0, -1.0, 1.0]);
        let down = gguf.tensor("blk.3.ffn_down.weight").unwrap();
        assert_eq!((down.format, down.cols(), down.rows()), (format, 768, 256));
        assert_eq!(
            gguf.data(down).len(),
            format.matrix_bytes(256, 768).unwrap()
        );
        let last = gguf.tensor("blk.3.post_attention_norm.weight").unwrap();
        assert_eq!(last.offset + last.bytes, gguf.file_bytes());
    }
}

#[test]
fn access_errors_name_file_key_found_and_expected() {
    let gguf = Gguf::from_bytes("x.gguf", nano()).unwrap();
    let text = |error: anyhow::Error| format!("{error:#}");
    assert_eq!(
        text(gguf.u32("general.name").unwrap_err()),
        "x.gguf: key general.name: found string, expected u32"
    );
    assert_eq!(
        text(gguf.f32("qwen35.block_count").unwrap_err()),
        "x.gguf: key qwen35.block_count: found u32, expected f32"
    );
    let types = gguf.key("prism.hadamard.sign_values").unwrap();
    assert_eq!(
        text(types.u32s().unwrap_err()),
        "x.gguf: key prism.hadamard.sign_values: found -1 at 0, expected u32"
    );
    assert_eq!(
        text(types.strs().unwrap_err()),
        "x.gguf: key prism.hadamard.sign_values: found array of i32, expected array of string"
    );
    let arch = gguf.key("general.architecture").unwrap();
    assert_eq!(
        text(arch.expect_str("llama").unwrap_err()),
        "x.gguf: key general.architecture: found \"qwen35\", expected \"llama\""
    );
    assert_eq!(
        text(gguf.u32("no.key").unwrap_err()),
        "x.gguf: key no.key is missing"
    );
    assert_eq!(
        text(gguf.tensor("t").unwrap_err()),
        "x.gguf: tensor t is missing"
    );
}

#[test]
fn cut_at_every_byte() {
    let whole = nano();
    let header = Gguf::from_bytes("whole", whole.clone()).unwrap().tensors()[0].offset as usize;
    for n in (0..header + 200)
        .chain((header..whole.len()).step_by(4099))
        .chain([whole.len() - 1])
    {
        refused(&whole[..n]);
    }
}

#[test]
fn hostile_counts_and_lengths() {
    let file = || {
        Raw::new()
            .key("k", 4, &[1, 0, 0, 0])
            .tensor("t", &[8], 0, 0)
    };
    Gguf::from_bytes("good", file().data(32)).unwrap();
    let bad = |line: &str, change: fn(&mut Raw)| {
        let mut raw = file();
        change(&mut raw);
        assert_eq!(refused(&raw.data(32)), format!("bad.gguf: {line}"));
    };
    bad("magic is \"GGML\", expected \"GGUF\"", |f| {
        f.magic = *b"GGML"
    });
    bad("version is 1, expected 3", |f| f.version = 1);
    bad("version is 4, expected 3", |f| f.version = 4);
    bad("version is 0, expected 3", |f| f.version = 0);
    bad(
        "version is 0x03000000: a big-endian file, expected little-endian",
        |f| f.version = 3 << 24,
    );
    bad(
        "tensor count is 9223372036854775808, expected at most 3 in 128 bytes",
        |f| f.tensors = 1 << 63,
    );
    bad(
        "key count is 9223372036854775808, expected at most 8 in 128 bytes",
        |f| f.keys = 1 << 63,
    );
    bad("key count is 9, expected at most 8 in 128 bytes", |f| {
        f.keys = 9
    });

    let body =
        |raw: Raw, line: &str| assert_eq!(refused(&raw.data(64)), format!("bad.gguf: {line}"));
    let mut raw = Raw::new();
    raw.keys = 1;
    raw.body.extend((1u64 << 40).to_le_bytes());
    body(
        raw,
        "the name of key 0 takes 1099511627776 bytes at byte 32, but only 64 are left",
    );
    body(
        Raw::new().key("s", 8, &(1u64 << 40).to_le_bytes()),
        "key s takes 1099511627776 bytes at byte 45, but only 83 are left",
    );
    body(
        Raw::new().key("s", 8, &u64::MAX.to_le_bytes()),
        "key s takes 18446744073709551615 bytes at byte 45, but only 83 are left",
    );
    let array = |element: u32, n: u64| [&element.to_le_bytes()[..], &n.to_le_bytes()].concat();
    body(
        Raw::new().key("a", 9, &array(10, 1 << 61)),
        "key a: 2305843009213693952 values, more than any file holds",
    );
    body(
        Raw::new().key("a", 9, &array(8, 1 << 63)),
        "key a: 9223372036854775808 strings, expected at most 9 in what is left of the file",
    );
    body(
        Raw::new().key("a", 9, &array(9, 1)),
        "key a: an array of arrays, expected numbers or strings",
    );
    body(
        Raw::new().key("a", 13, &[]),
        "key a: value type is 13, expected 0 to 12",
    );
    body(
        Raw::new().key("b", 7, &[2]),
        "key b: a bool is 2, expected 0 or 1",
    );
    body(
        Raw::new().key("", 7, &[1]),
        "the name of key 0 is 0 bytes long, expected 1 to 65535",
    );
    body(
        Raw::new().key("twice", 7, &[1]).key("twice", 7, &[1]),
        "key twice comes twice",
    );
    body(
        Raw::new().key("split.count", 2, &[3, 0]),
        "key split.count: found 3, expected a file in one piece (merge the parts first)",
    );
    for n in [0u32, 3, 24, 1 << 31] {
        body(
            Raw::new().key("general.alignment", 4, &n.to_le_bytes()),
            &format!("key general.alignment: found {n}, expected a power of two up to 2097152"),
        );
    }
    let mut raw = Raw::new();
    raw.keys = 1;
    let raw = raw.string(b"\xff\xfe");
    assert!(refused(&raw.data(0)).contains("expected UTF-8"));
}

#[test]
fn hostile_tensors() {
    let bad =
        |raw: Raw, line: &str| assert_eq!(refused(&raw.data(64)), format!("bad.gguf: {line}"));
    let one = |dims: &[u64], id, offset| Raw::new().tensor("t", dims, id, offset);
    bad(one(&[], 0, 0), "tensor t: 0 dimensions, expected 1 to 4");
    bad(
        one(&[1; 5], 0, 0),
        "tensor t: 5 dimensions, expected 1 to 4",
    );
    bad(
        one(&[1, 0], 0, 0),
        "tensor t: dimensions [1, 0], expected none to be 0",
    );
    bad(
        one(&[1 << 32, 1 << 32], 0, 0),
        "tensor t: dimensions [4294967296, 4294967296] overflow, expected a product below 2^63",
    );
    bad(
        one(&[1 << 16; 4], 0, 0),
        "tensor t: dimensions [65536, 65536, 65536, 65536] overflow, expected a product below 2^63",
    );
    bad(
        one(&[1 << 62], 0, 0),
        "tensor t: f32: a row of 4611686018427387904 weights is too large for this machine",
    );
    bad(
        one(&[17], 0, 0),
        "tensor t: 68 bytes at offset 0, but only 64 are left",
    );
    bad(
        one(&[1], 0, 64),
        "tensor t: offset 64 is past the end, the file holds 64 bytes of data",
    );
    bad(
        one(&[1], 0, u64::MAX - 31),
        "tensor t: offset 18446744073709551584 is past the end, the file holds 64 bytes of data",
    );
    bad(
        one(&[1], 0, 4),
        "tensor t: offset 4, expected a multiple of 32",
    );
    bad(
        one(&[33], 8, 0),
        "tensor t: q8_0: a row of 33 weights is not a multiple of the block of 32",
    );
    assert!(refused(&one(&[256], 12, 0).data(256)).starts_with(
        "bad.gguf: tensor t: type id 12 is not supported, expected one of f32 0, f16 1"
    ));
    bad(
        one(&[16], 0, 0).tensor("u", &[8], 0, 32),
        "tensor t: 64 bytes at offset 0 reach into the next tensor, expected at most 32",
    );
    bad(
        one(&[8], 0, 0).tensor("u", &[8], 0, 0),
        "tensor t: 32 bytes at offset 0 reach into the next tensor, expected at most 0",
    );
    bad(
        one(&[8], 0, 0).tensor("t", &[8], 0, 32),
        "tensor t comes twice",
    );
}

#[test]
fn colliding_type_ids() {
    let file = |id, bytes: usize| Raw::new().tensor("t", &[256, 64], id, 0).data(bytes);
    let format = |id, bytes| Gguf::from_bytes("x", file(id, bytes)).unwrap().tensors()[0].format;
    assert_eq!(format(42, 256 * 18), Format::Q2_0);
    assert_eq!(format(42, 128 * 34), Format::Pq2_0);
    assert_eq!(format(142, 128 * 34), Format::Pq2_0);
    assert_eq!(format(143, 128 * 28), Format::Ptq1_0);
    assert_eq!(
        refused(&file(142, 64 * 66)),
        "bad.gguf: tensor t: type id 142 takes 4352 bytes as PQ2_0, but the offsets leave it 4224: the \
         file is cut or the id means ik_llama.cpp's retired IQ2_TN, expected an exact fit"
    );
    for bytes in [64 * 52 + 64 * 2, 64 * 54, 256 * 64] {
        let line = refused(&file(143, bytes));
        assert!(
            line.contains("as PTQ1_0") && line.contains("IQ1_TN"),
            "{line}"
        );
    }
    let line = refused(&file(42, 256 * 64 * 5 / 24));
    assert!(
        line.contains("blocks of 64") && line.contains("TL2"),
        "{line}"
    );
    // The room after a tensor in the middle counts too, unless keys say whose file it is.
    let gap = |raw: Raw| {
        raw.tensor("t", &[128], 142, 0)
            .tensor("u", &[8], 0, 96)
            .data(128)
    };
    assert!(refused(&gap(Raw::new())).contains("34 bytes as PQ2_0"));
    let keyed = gap(Raw::new().key("prism.hadamard.version", 4, &[1, 0, 0, 0]));
    Gguf::from_bytes("x", keyed).unwrap();
}

/// Random keys and tensors, written and read back.
#[test]
fn round_trip() {
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..40 {
        let mut writer = Writer::new();
        let alignment = 1u32 << rng.random_range(0..9);
        writer.set("general.alignment", alignment).unwrap();
        writer.set("u8", rng.random::<u8>()).unwrap();
        writer.set("i8", rng.random::<i8>()).unwrap();
        writer.set("u16", rng.random::<u16>()).unwrap();
        writer.set("i16", rng.random::<i16>()).unwrap();
        let (u, i, x) = (
            rng.random::<u64>(),
            rng.random::<i64>(),
            rng.random::<f64>(),
        );
        writer.set("u64", u).unwrap();
        writer.set("i64", i).unwrap();
        writer.set("f64", x).unwrap();
        writer.set("bool", true).unwrap();
        writer.set_str("str", "a\nb \0 \u{1f600}").unwrap();
        let numbers: Vec<i32> = (0..rng.random_range(0..50)).map(|_| rng.random()).collect();
        writer.set_array("numbers", &numbers).unwrap();
        let texts: Vec<String> = (0..rng.random_range(0..20))
            .map(|n| "x".repeat(n))
            .collect();
        writer.set_strs("texts", &texts).unwrap();
        let mut data = Vec::new();
        for n in 0..rng.random_range(0..12) {
            let format = Format::ALL[rng.random_range(0..10)];
            let mut dims = vec![format.block_weights() * rng.random_range(1..4)];
            dims.extend((0..rng.random_range(0..4)).map(|_| rng.random_range(1..4usize)));
            writer.tensor(&format!("t{n}"), &dims, format).unwrap();
            let bytes = format
                .matrix_bytes(dims[1..].iter().product(), dims[0])
                .unwrap();
            let bytes: Vec<u8> = (0..bytes).map(|_| rng.random()).collect();
            data.push((dims, format, bytes));
        }
        let mut bytes = Vec::new();
        let produce = |i: usize, out: &mut dyn std::io::Write| Ok(out.write_all(&data[i].2)?);
        writer.write_to(&mut bytes, produce).unwrap();

        let gguf = Gguf::from_bytes("x", bytes.clone()).unwrap();
        assert_eq!(gguf.alignment(), u64::from(alignment));
        let value = |key: &str| gguf.key(key).unwrap();
        assert_eq!(value("u64").u64().unwrap(), u);
        assert_eq!(value("i64").i64().unwrap(), i);
        assert_eq!(value("f64").f32().unwrap(), x as f32);
        assert!(value("bool").bool().unwrap());
        assert_eq!(value("str").str().unwrap(), "a\nb \0 \u{1f600}");
        assert_eq!(value("numbers").i32s().unwrap(), numbers);
        assert_eq!(value("texts").strs().unwrap(), texts);
        for (t, (dims, format, bytes)) in gguf.tensors().iter().zip(&data) {
            assert_eq!(
                (&t.dims, t.format, gguf.data(t)),
                (dims, *format, &bytes[..])
            );
        }

        let mut copy = Writer::new();
        for key in gguf.keys() {
            copy.copy(&key).unwrap();
        }
        for t in gguf.tensors() {
            copy.tensor(&t.name, &t.dims, t.format).unwrap();
        }
        let mut again = Vec::new();
        let produce = |i: usize, out: &mut dyn std::io::Write| {
            Ok(out.write_all(gguf.data(&gguf.tensors()[i]))?)
        };
        copy.write_to(&mut again, produce).unwrap();
        assert_eq!(bytes, again);
    }
}

#[test]
fn writer_refuses() {
    let mut writer = Writer::new();
    writer.set("k", 1u32).unwrap();
    assert!(writer.set("k", 2u32).is_err());
    assert!(writer.set("", 2u32).is_err());
    assert!(writer.set("general.alignment", 24u32).is_err());
    assert!(writer.set("general.alignment", 32u64).is_err());
    assert!(writer.tensor("t", &[100], Format::Pq2_0).is_err());
    assert!(writer.tensor("t", &[], Format::F32).is_err());
    assert!(writer.tensor("t", &[usize::MAX, 2], Format::F32).is_err());
    writer.tensor("t", &[2], Format::F32).unwrap();
    let write = |writer: &Writer, n: usize| {
        let bytes = vec![0; n];
        writer.write_to(&mut Vec::new(), |_, out| Ok(out.write_all(&bytes)?))
    };
    write(&writer, 8).unwrap();
    assert!(write(&writer, 7).is_err() && write(&writer, 9).is_err());
    writer.tensor("t", &[2], Format::F32).unwrap();
    assert!(write(&writer, 8).is_err());
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let folder = std::env::temp_dir().join(format!("tern-gguf-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("model.gguf");
    let mut writer = Writer::new();
    writer.tensor("t", &[2], Format::F32).unwrap();
    writer
        .write(&path, |_, out| Ok(out.write_all(&[1; 8])?))
        .unwrap();
    let error = writer.write(&path, |_, out| {
        out.write_all(&[2; 4])?;
        anyhow::bail!("the source ran dry")
    });
    assert!(format!("{:#}", error.unwrap_err()).contains("ran dry"));
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.data(&gguf.tensors()[0]), [1; 8]);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    assert!(format!("{:#}", Gguf::open(&folder).unwrap_err()).contains("not a regular file"));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Bytes changed, cut, repeated and moved: read or refused in one line, never a panic; what is read
/// can be shown.
#[test]
fn mutations() {
    let whole = nano();
    let header = Gguf::from_bytes("whole", whole.clone()).unwrap().tensors()[0].offset as usize;
    // Most of the header is token strings; aim at the rest as well.
    let infos = header - 4000;
    let mut rng = StdRng::seed_from_u64(2);
    for _ in 0..3000 {
        let mut bytes = whole.clone();
        for _ in 0..rng.random_range(1..6) {
            let end = [1500, header][rng.random_range(0..2)];
            let at = match rng.random_range(0..2) {
                0 => rng.random_range(0..end),
                _ => rng.random_range(infos..header),
            };
            match rng.random_range(0..5) {
                0 => bytes[at] ^= 1 << rng.random_range(0..8),
                1 => bytes[at] = [0, 1, 127, 128, 255][rng.random_range(0..5)],
                2 => bytes[at..at + 8]
                    .copy_from_slice(&(1u64 << rng.random_range(0..64)).to_le_bytes()),
                3 => bytes.truncate(rng.random_range(header..bytes.len() + 1)),
                _ => bytes.copy_within(at..at + 16, rng.random_range(0..header)),
            }
        }
        match Gguf::from_bytes("bad.gguf", bytes) {
            Ok(gguf) => {
                for value in gguf.keys() {
                    assert!(!value.display(40).is_empty());
                    let _ = (
                        value.u32(),
                        value.strs(),
                        value.f32s(),
                        value.i32s(),
                        value.str(),
                    );
                }
                for t in gguf.tensors() {
                    assert_eq!(gguf.data(t).len() as u64, t.bytes);
                }
            }
            Err(error) => {
                let line = format!("{error:#}");
                assert!(
                    line.starts_with("bad.gguf: ") && !line.contains('\n'),
                    "{line}"
                );
            }
        }
    }
}
