use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::formats::Format;
use crate::runtime::hyper::Hyper;

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
        "key a: 2305843009213693952 values, expected at most 4194304",
    );
    body(
        Raw::new().key("a", 9, &array(8, 1 << 63)),
        "key a: 9223372036854775808 values, expected at most 4194304",
    );
    body(
        Raw::new().key("a", 9, &array(8, 1 << 22)),
        "the length of key a takes 8 bytes at byte 121, but only 7 are left",
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
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
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
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
    assert!(format!("{:#}", Gguf::open(folder).unwrap_err()).contains("not a regular file"));
    // What is no file stays what it is.
    let error = writer.write(folder, |_, out| Ok(out.write_all(&[1; 8])?));
    assert!(format!("{:#}", error.unwrap_err()).contains("is a folder, expected a regular file"));
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

/// The nano file with one key, or all that start so, replaced (or dropped), keys and tensor infos otherwise the same.
fn nano_with(key: &str, change: impl FnOnce(&mut Writer)) -> Gguf {
    let nano = Gguf::open(&model("tern-nano-pq2_0.gguf")).unwrap();
    let mut writer = Writer::new();
    for value in nano.keys().filter(|v| !v.key().starts_with(key)) {
        writer.copy(&value).unwrap();
    }
    change(&mut writer);
    for t in nano.tensors() {
        writer.tensor(&t.name, &t.dims, t.format).unwrap();
    }
    let mut bytes = Vec::new();
    let produce =
        |i: usize, out: &mut dyn std::io::Write| Ok(out.write_all(nano.data(&nano.tensors()[i]))?);
    writer.write_to(&mut bytes, produce).unwrap();
    Gguf::from_bytes("bad.gguf", bytes).unwrap()
}

#[test]
fn rotation_is_read_whole() {
    let nano = Gguf::open(&model("tern-nano-pq2_0.gguf")).unwrap();
    let rotation = Rotation::read(&nano).unwrap().unwrap();
    assert_eq!((rotation.block, rotation.matrices()), (256, 26));
    assert!(rotation.rotates_embedding() && rotation.gdn_v_grouped);
    assert!(rotation.rotates_input("blk.0.ffn_up.weight"));
    assert!(!rotation.rotates_input("blk.0.ssm_alpha.weight"));
    assert!(!rotation.rotates_input("token_embd.weight") && rotation.stores("token_embd.weight"));
    assert!(rotation.groups_heads("blk.2.ssm_out.weight"));
    assert!(!rotation.groups_heads("blk.3.attn_output.weight"));
    assert_eq!(
        (rotation.signs(256).len(), rotation.signs(768).len()),
        (256, 768)
    );

    let plain = nano_with("prism.hadamard.sign_", |w| {
        w.set_str("prism.hadamard.sign_mode", "identity").unwrap();
    });
    assert_eq!(Rotation::read(&plain).unwrap().unwrap().signs(768).len(), 0);
}

#[test]
fn rotation_refuses_what_it_does_not_know() {
    let refused = |key: &str, change: &dyn Fn(&mut Writer, &str), line: &str| {
        let key = format!("prism.hadamard.{key}");
        let file = nano_with(&key, |w| change(w, &key));
        let found = format!("{:#}", Rotation::read(&file).unwrap_err());
        assert_eq!(found, format!("bad.gguf: {line}"));
    };
    let drop = |_: &mut Writer, _: &str| {};
    for key in [
        "version",
        "block_size",
        "transform",
        "axis",
        "sign_mode",
        "sign_widths",
        "weight_names",
        "inverse_weight_names",
    ] {
        refused(key, &drop, &format!("key prism.hadamard.{key} is missing"));
    }
    refused(
        "seed",
        &|w, k| w.set(k, 2u32).unwrap(),
        "key prism.hadamard.seed: found a key of a rotation that is not known, expected none",
    );
    refused(
        "sign_mode",
        &|w, k| w.set_str(k, "identity").unwrap(),
        "key prism.hadamard.sign_widths: found widths, expected none with sign_mode identity",
    );
    refused(
        "version",
        &|w, k| w.set(k, 2u32).unwrap(),
        "key prism.hadamard.version: found 2, expected version 1",
    );
    refused(
        "transform",
        &|w, k| w.set_str(k, "dct").unwrap(),
        "key prism.hadamard.transform: found \"dct\", expected \"normalized-sylvester-walsh-hadamard\"",
    );
    refused(
        "axis",
        &|w, k| w.set(k, 0u32).unwrap(),
        "key prism.hadamard.axis: found u32, expected string",
    );
    refused(
        "sign_mode",
        &|w, k| w.set_str(k, "seeded").unwrap(),
        "key prism.hadamard.sign_mode: found \"seeded\", expected \"identity\" or \"explicit\"",
    );
    refused(
        "block_size",
        &|w, k| w.set(k, 96u32).unwrap(),
        "key prism.hadamard.block_size: found 96, expected a power of two",
    );
    refused(
        "block_size",
        &|w, k| w.set(k, 512u32).unwrap(),
        "key prism.hadamard.sign_widths: found 256, expected multiples of the block of 512",
    );
    refused(
        "sign_widths",
        &|w, k| w.set_array(k, &[256u32]).unwrap(),
        "key prism.hadamard.sign_values: found 1024 values, expected as many as sign_widths in all",
    );
    refused(
        "sign_widths",
        &|w, k| w.set_array(k, &[256u32, 1024]).unwrap(),
        "key prism.hadamard.sign_values: found 1024 values, expected as many as sign_widths in all",
    );
    refused(
        "sign_widths",
        &|w, k| w.set_array(k, &[256u32, 256, 512]).unwrap(),
        "key prism.hadamard.sign_widths: found 256 twice, expected each width once",
    );
    refused(
        "sign_widths",
        &|w, k| w.set_array(k, &[1024u32]).unwrap(),
        "tensor output.weight: width 256 has no signs in prism.hadamard.sign_widths",
    );
    refused(
        "sign_values",
        &|w, k| w.set_array(k, &[0i8; 1024]).unwrap(),
        "key prism.hadamard.sign_values: found 0, expected 1 and -1",
    );
    let names = |w: &mut Writer, k: &str, names: &[&str]| w.set_strs(k, names).unwrap();
    refused(
        "weight_names",
        &|w, k| names(w, k, &["blk.9.ffn_up.weight"]),
        "a prism.hadamard. key lists blk.9.ffn_up.weight: bad.gguf: tensor blk.9.ffn_up.weight is missing",
    );
    refused(
        "weight_names",
        &|w, k| names(w, k, &["output_norm.weight"]),
        "key prism.hadamard.weight_names: found output_norm.weight, expected matrices of this model's products",
    );
    refused(
        "weight_names",
        &|w, k| names(w, k, &["output.weight", "output.weight"]),
        "key prism.hadamard.weight_names: found output.weight twice, expected each name once",
    );
    refused(
        "inverse_weight_names",
        &|w, k| names(w, k, &["output.weight"]),
        "key prism.hadamard.inverse_weight_names: found output.weight, expected token_embd.weight, once",
    );
}

#[test]
fn ternary_packings_convert_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    let run = |from: &std::path::Path, to: &std::path::Path, format| {
        let input = Gguf::open(from).unwrap();
        let mut done = 0;
        convert(&input, to, format, |n| done += n).unwrap();
        assert_eq!(done, input.tensors().iter().map(|t| t.bytes).sum::<u64>());
    };
    let same = |file: &std::path::Path, name: &str| {
        assert!(std::fs::read(file).unwrap() == std::fs::read(model(name)).unwrap());
    };
    run(&model("tern-nano-pq2_0.gguf"), &a, Format::Ptq1_0);
    same(&a, "tern-nano-ptq1_0.gguf");
    run(&a, &b, Format::Pq2_0);
    same(&b, "tern-nano-pq2_0.gguf");
    run(&a, &b, Format::Q2_0);
    let q2_0 = Gguf::open(&b).unwrap();
    assert_eq!(q2_0.u32("general.file_type").unwrap(), 41);
    assert!(Rotation::read(&q2_0).unwrap().is_some());
    run(&b, &a, Format::Pq2_0);
    same(&a, "tern-nano-pq2_0.gguf");
}

/// The file with which `models/reference.json` was computed, made again to the last byte.
#[test]
fn dense_f32_is_the_reference_file() {
    use sha2::{Digest, Sha256};
    let folder = tempfile::tempdir().unwrap();
    for name in ["tern-nano-pq2_0.gguf", "tern-nano-ptq1_0.gguf"] {
        let path = folder.path().join(name);
        convert(
            &Gguf::open(&model(name)).unwrap(),
            &path,
            Format::F32,
            |_| (),
        )
        .unwrap();
        let bytes = std::fs::read(path).unwrap();
        let hash: String = Sha256::digest(&bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(bytes.len(), 17_948_640);
        assert_eq!(
            hash,
            "47549411e13d5b1895b90a0c143cccf3a4a7dc8dd7ce240752151687c20296d3"
        );
    }
}

#[test]
fn dense_formats_hold_the_folded_weights() {
    let folder = tempfile::tempdir().unwrap();
    let nano = Gguf::open(&model("tern-nano-pq2_0.gguf")).unwrap();
    let read = |format: Format| {
        let path = folder.path().join(format.name());
        convert(&nano, &path, format, |_| ()).unwrap();
        let file = Gguf::open(&path).unwrap();
        assert!(Rotation::read(&file).unwrap().is_none());
        assert_eq!(file.keys().len(), nano.keys().len() - 10);
        let tensor = file.tensor("blk.1.ffn_down.weight").unwrap();
        assert_eq!(tensor.format, format);
        let mut x = vec![0f32; tensor.weights()];
        format.dequantize(file.data(tensor), &mut x).unwrap();
        assert_eq!(
            file.tensor("output_norm.weight").unwrap().format,
            Format::F32
        );
        x
    };
    let exact = read(Format::F32);
    let largest = exact.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (format, share) in [
        (Format::F16, 1e-3),
        (Format::Q8_0, 5e-3),
        (Format::Q4_0, 0.126),
    ] {
        for (x, y) in exact.iter().zip(read(format)) {
            assert!((x - y).abs() <= share * largest, "{format}: {x} {y}");
        }
    }
}

#[test]
fn conversions_that_would_lose_something_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.gguf");
    let file = |format: Format, cols: usize, bytes: Vec<u8>| {
        let mut writer = Writer::new();
        writer.tensor("t", &[cols], format).unwrap();
        let mut out = Vec::new();
        writer
            .write_to(&mut out, |_, out| Ok(out.write_all(&bytes)?))
            .unwrap();
        Gguf::from_bytes("in.gguf", out).unwrap()
    };
    let refused = |gguf: Gguf, to: Format, words: &str| {
        let line = format!("{:#}", convert(&gguf, &path, to, |_| ()).unwrap_err());
        assert!(
            line.starts_with("in.gguf") && line.contains(words),
            "{line}"
        );
        assert!(!path.exists());
    };
    let packed = |format: Format, codes: &[u8], d: &[f32]| {
        let d: Vec<half::f16> = d.iter().map(|&d| half::f16::from_f32(d)).collect();
        let mut bytes = vec![0; format.row_bytes(codes.len()).unwrap()];
        format.pack(codes, &d, &mut bytes).unwrap();
        file(format, codes.len(), bytes)
    };
    refused(
        packed(Format::Pq2_0, &[3; 128], &[1.0]),
        Format::Ptq1_0,
        "code 3",
    );
    refused(
        packed(Format::Q2_0, &[1; 128], &[1.0, 2.0]),
        Format::Pq2_0,
        "scales 1 and 2",
    );
    refused(
        packed(Format::Q2_0, &[1; 64], &[1.0]),
        Format::Pq2_0,
        "multiple of the block of 128",
    );
    refused(
        packed(Format::Pq2_0, &[1; 128], &[f32::NAN]),
        Format::F32,
        "value NaN",
    );
    refused(
        packed(Format::Pq2_0, &[3; 128], &[6e4]),
        Format::F16,
        "value 120000",
    );
    refused(
        packed(Format::Pq2_0, &[1; 128], &[1.0]),
        Format::Tq2_0,
        "not a format to convert to",
    );
    refused(
        file(Format::F32, 1, vec![0; 4]),
        Format::F16,
        "no ternary tensors",
    );
    // Code 3 and odd scales are kept where they can be.
    convert(
        &packed(Format::Pq2_0, &[3; 128], &[f32::INFINITY]),
        &path,
        Format::Q2_0,
        |_| (),
    )
    .unwrap();
    let kept = Gguf::open(&path).unwrap();
    let survey = Survey::of(&kept, &kept.tensors()[0]);
    assert_eq!((survey.code_3, survey.non_finite), (128, 2));
}

#[test]
fn survey_counts() {
    let mut rng = StdRng::seed_from_u64(3);
    // More than one block, chunk and thread's share.
    for format in Format::ALL.into_iter().filter(|f| f.is_ternary()) {
        let n = 256 * 40_000;
        let most = if matches!(format, Format::Tq1_0 | Format::Ptq1_0) {
            3
        } else {
            4
        };
        let codes: Vec<u8> = (0..n).map(|_| rng.random_range(0..most)).collect();
        let mut scales = vec![half::f16::ONE; n / format.block_weights()];
        scales[7] = half::f16::NAN;
        *scales.last_mut().unwrap() = half::f16::INFINITY;
        let mut writer = Writer::new();
        writer.tensor("t", &[256, 40_000], format).unwrap();
        let mut bytes = Vec::new();
        let mut packed = vec![0; format.row_bytes(n).unwrap()];
        format.pack(&codes, &scales, &mut packed).unwrap();
        writer
            .write_to(&mut bytes, |_, out| Ok(out.write_all(&packed)?))
            .unwrap();
        let gguf = Gguf::from_bytes("x", bytes).unwrap();
        let count = |code| codes.iter().filter(|&&u| u == code).count() as u64;
        let expected = Survey {
            codes: n as u64,
            zeros: count(1),
            code_3: count(3),
            non_finite: 2,
        };
        assert_eq!(Survey::of(&gguf, &gguf.tensors()[0]), expected, "{format}");
    }
    let mut writer = Writer::new();
    writer.tensor("t", &[4], Format::F32).unwrap();
    let mut bytes = Vec::new();
    let values = [0.0, f32::NAN, f32::INFINITY, 1.0]
        .map(f32::to_le_bytes)
        .concat();
    writer
        .write_to(&mut bytes, |_, out| Ok(out.write_all(&values)?))
        .unwrap();
    let gguf = Gguf::from_bytes("x", bytes).unwrap();
    let survey = Survey::of(&gguf, &gguf.tensors()[0]);
    assert_eq!((survey.non_finite, survey.zero_share()), (2, None));
}

#[test]
fn memory_of_a_run() {
    let nano = Gguf::open(&model("tern-nano-pq2_0.gguf")).unwrap();
    let hyper = Hyper::from_gguf(&nano).unwrap();
    let memory = Memory::of(&nano, &hyper, 1000, 64);
    assert_eq!(
        memory.weights,
        nano.tensors().iter().map(|t| t.bytes).sum::<u64>()
    );
    // One full layer: keys and values of 2 heads of 64. Three linear ones: 4 states of 64 x 64 and
    // 3 inputs of 512 channels.
    assert_eq!(memory.kv_cache, 1000 * 2 * 2 * 64 * 4);
    assert_eq!(memory.recurrent, 3 * (4 * 64 * 64 + 3 * 512) * 4);
    let huge = Memory::of(&nano, &hyper, u64::MAX, u64::MAX);
    assert_eq!(huge.total(), u64::MAX);
    assert_eq!(huge.recurrent, memory.recurrent);
}
