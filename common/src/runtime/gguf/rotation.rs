//! The `prism.hadamard.*` keys: which tensors are stored in a rotated basis, and which one.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};

use super::{Gguf, Shown};

const PREFIX: &str = "prism.hadamard.";
const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
const KEYS: [&str; 10] = [
    "version",
    "transform",
    "axis",
    "block_size",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
];
const AXIS: &str = "input-last-dimension";
const EMBEDDING: &str = "token_embd.weight";

/// The matrices that may be rotated along their input, apart from the head.
const PRODUCTS: [&str; 10] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_gate",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ssm_out",
];

/// The rotation of a file's weights. With H the normalized Walsh-Hadamard matrix of one block
/// (H\[r\]\[c\] = (-1)^popcount(r & c) / sqrt(block)) and s the signs of an input width:
/// a weight stores W' = W S H and wants x' = H (s * x); an embedding row z is looked up as
/// s * (H z).
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Weights a block of the transform; a power of two that divides every rotated width.
    pub block: usize,
    /// By width, signs of +1 and -1; none at all when the signs are the identity.
    signs: BTreeMap<usize, Vec<f32>>,
    weights: BTreeSet<String>,
    embedding: bool,
    /// Whether the input columns of `ssm_out` have the value heads in grouped order (all heads of
    /// key head 0 first) rather than tiled (head j belongs to key head j mod their number).
    pub gdn_v_grouped: bool,
}

impl Rotation {
    /// Reads the keys whole. `None` if the file has none of them.
    ///
    /// # Errors
    /// A key, version, transform, axis or sign mode that is not known; a key that is missing; a listed tensor that is missing,
    /// listed twice, or not one whose input this crate knows how to rotate; a width that the block
    /// does not divide or that has no signs; signs other than +-1. Skipping the rotation would
    /// compute fluent nonsense, so nothing is passed over.
    pub fn read(gguf: &Gguf) -> Result<Option<Self>> {
        if !gguf.keys().any(|v| v.key().starts_with(PREFIX)) {
            return Ok(None);
        }
        for value in gguf.keys() {
            let name = value.key().strip_prefix(PREFIX);
            ensure!(
                name.is_none_or(|name| KEYS.contains(&name)),
                value.unexpected("a key of a rotation that is not known", "none")
            );
        }
        let get = |name: &str| gguf.get(&format!("{PREFIX}{name}"));
        let key = |name: &str| gguf.key(&format!("{PREFIX}{name}"));
        let version = key("version")?;
        ensure!(
            version.u32()? == 1,
            version.unexpected(&version.display(20), "version 1")
        );
        key("transform")?.expect_str(TRANSFORM)?;
        key("axis")?.expect_str(AXIS)?;
        let size = key("block_size")?;
        let block = size.usize()?;
        ensure!(
            block.is_power_of_two(),
            size.unexpected(&block.to_string(), "a power of two")
        );
        let mode = key("sign_mode")?;
        let explicit = match mode.str()? {
            "identity" => false,
            "explicit" => true,
            _ => bail!(mode.unexpected(&mode.display(60), "\"identity\" or \"explicit\"")),
        };
        let signs = if explicit {
            Self::read_signs(gguf, block)?
        } else {
            if let Some(widths) = get("sign_widths") {
                ensure!(
                    widths.usizes()?.is_empty(),
                    widths.unexpected("widths", "none with sign_mode identity")
                );
            }
            BTreeMap::new()
        };
        let mut rotation = Self {
            block,
            signs,
            weights: BTreeSet::new(),
            embedding: false,
            gdn_v_grouped: get("gdn_v_grouped").map_or(Ok(false), |v| v.bool())?,
        };
        let weights = key("weight_names")?;
        for name in weights.strs()? {
            let shown = Shown(name);
            ensure!(
                is_product(name),
                weights.unexpected(&shown.to_string(), "matrices of this model's products")
            );
            ensure!(
                rotation.weights.insert(name.to_owned()),
                weights.unexpected(&format!("{shown} twice"), "each name once")
            );
            rotation.check(gguf, name)?;
        }
        let tables = key("inverse_weight_names")?;
        for name in tables.strs()? {
            let shown = Shown(name);
            ensure!(
                name == EMBEDDING && !rotation.embedding,
                tables.unexpected(&shown.to_string(), &format!("{EMBEDDING}, once"))
            );
            rotation.embedding = true;
            rotation.check(gguf, name)?;
        }
        Ok(Some(rotation))
    }

    fn read_signs(gguf: &Gguf, block: usize) -> Result<BTreeMap<usize, Vec<f32>>> {
        let widths = gguf.key(&format!("{PREFIX}sign_widths"))?;
        let values = gguf.key(&format!("{PREFIX}sign_values"))?;
        let all = values.f32s()?;
        let mut rest = all.as_slice();
        let mut signs = BTreeMap::new();
        for width in widths.usizes()? {
            ensure!(
                width > 0 && width.is_multiple_of(block),
                widths.unexpected(
                    &width.to_string(),
                    &format!("multiples of the block of {block}")
                )
            );
            let (these, after) = rest.split_at_checked(width).with_context(|| {
                let found = format!("{} values", all.len());
                values
                    .unexpected(&found, "as many as sign_widths in all")
                    .to_string()
            })?;
            rest = after;
            ensure!(
                signs.insert(width, these.to_vec()).is_none(),
                widths.unexpected(&format!("{width} twice"), "each width once")
            );
        }
        ensure!(
            rest.is_empty(),
            values.unexpected(
                &format!("{} values", all.len()),
                "as many as sign_widths in all"
            )
        );
        if let Some(x) = all.iter().find(|x| x.abs() != 1.0) {
            bail!(values.unexpected(&x.to_string(), "1 and -1"));
        }
        ensure!(
            !signs.is_empty(),
            widths.unexpected("no width", "one for each input width")
        );
        Ok(signs)
    }

    /// Holds the width of a listed tensor against block and signs.
    fn check(&self, gguf: &Gguf, name: &str) -> Result<()> {
        let (file, shown, block) = (gguf.file(), Shown(name), self.block);
        let tensor = gguf
            .tensor(name)
            .with_context(|| format!("{file}: a {PREFIX} key lists {shown}"))?;
        let width = tensor.cols();
        ensure!(
            width.is_multiple_of(block),
            "{file}: tensor {shown}: width {width}, expected a multiple of {PREFIX}block_size, {block}"
        );
        ensure!(
            self.signs.is_empty() || self.signs.contains_key(&width),
            "{file}: tensor {shown}: width {width} has no signs in {PREFIX}sign_widths"
        );
        Ok(())
    }

    /// Whether the input of this tensor's product is to be rotated.
    pub fn rotates_input(&self, name: &str) -> bool {
        self.weights.contains(name)
    }

    /// Whether rows looked up in the embedding are to be rotated back.
    pub fn rotates_embedding(&self) -> bool {
        self.embedding
    }

    /// Whether a tensor is stored in the rotated basis, in either way.
    pub fn stores(&self, name: &str) -> bool {
        self.rotates_input(name) || (self.embedding && name == EMBEDDING)
    }

    /// Whether the input columns of this tensor are in grouped order.
    pub fn groups_heads(&self, name: &str) -> bool {
        self.gdn_v_grouped && self.rotates_input(name) && name.ends_with(".ssm_out.weight")
    }

    /// Whether the signs are given, rather than all +1.
    pub fn has_signs(&self) -> bool {
        !self.signs.is_empty()
    }

    /// Number of rotated matrices, the embedding aside.
    pub fn matrices(&self) -> usize {
        self.weights.len()
    }

    /// The signs of an input width: +1 and -1, or nothing when they are all +1.
    ///
    /// # Panics
    /// Never for the width of a tensor that is stored rotated: reading refused those without signs.
    pub fn signs(&self, width: usize) -> &[f32] {
        match self.signs.is_empty() {
            true => &[],
            false => &self.signs[&width],
        }
    }
}

/// `output.weight`, or `blk.N.KIND.weight` of a kind in [`PRODUCTS`].
fn is_product(name: &str) -> bool {
    let inner = || {
        let (layer, kind) = name
            .strip_prefix("blk.")?
            .strip_suffix(".weight")?
            .split_once('.')?;
        layer.parse::<u32>().ok()?;
        PRODUCTS.contains(&kind).then_some(())
    };
    name == "output.weight" || inner().is_some()
}
