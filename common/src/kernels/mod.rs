//! Arithmetic on blocks: a scalar reference, and one folder an architecture, one file an instruction set.
//!
//! A [`Kernel`] multiplies a weight matrix in one [`Layout`] by a batch of [`Activations`] with one instruction set
//! ([`Isa`]): decode (gemv) when the batch is one token, prefill (gemm) when it is more. All kernels of a format give
//! the same bits: integer sums are exact, and floats follow one rule. For each run of k that shares one weight scale and one
//! activation scale, in order of k, `acc = fma(f32(integer sum), dw * dy, acc)`, from 0.
//!
//! Formats that no model is stored in have kernels of their own kind: [`bitcos`], [`lookup`].

pub mod activations;
#[cfg(target_arch = "aarch64")]
pub mod arm;
pub mod bitcos;
pub mod census;
pub mod dots;
mod float;
pub mod lookup;
pub mod oracle;
pub mod peak;
pub mod read;
pub mod reference;
pub mod unpack;
#[cfg(target_arch = "x86_64")]
pub mod x86;

use std::fmt;
use std::ops::Range;

use anyhow::{Result, bail, ensure};

use crate::formats::Format;
pub use crate::formats::Layout;
use crate::formats::layout::Parts;
pub use activations::{Activations, Form, Group, TILE};

/// An instruction set, by the name that result rows give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// 256-bit dot products of bytes: AVX-VNNI, or their AVX-512VL form.
    AvxVnni,
    /// 512-bit dot products of bytes: AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
    /// Armv8 without dot products.
    Neon,
    /// Arm FEAT_DotProd.
    Dotprod,
    /// Arm FEAT_I8MM.
    I8mm,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 7] = [
        Isa::Scalar,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512Vnni,
        Isa::Neon,
        Isa::Dotprod,
        Isa::I8mm,
    ];

    /// `avx512-vnni`, as result rows and `--kernel` write it.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Neon => "neon",
            Isa::Dotprod => "dotprod",
            Isa::I8mm => "i8mm",
        }
    }

    /// Whether this CPU has it.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => x86::avx_vnni() || x86::avx512(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => x86::avx512(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => arm::dotprod(),
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => arm::i8mm(),
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A weight matrix, `rows` x `cols`, in a layout.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRef<'a> {
    layout: Layout,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
    parts: Parts<'a>,
}

impl<'a> MatrixRef<'a> {
    /// A matrix over its bytes.
    ///
    /// # Errors
    /// A length that does not fit layout and shape.
    pub fn new(layout: Layout, rows: usize, cols: usize, bytes: &'a [u8]) -> Result<Self> {
        let parts = layout.parts(bytes, rows, cols)?;
        Ok(MatrixRef {
            layout,
            rows,
            cols,
            bytes,
            parts,
        })
    }

    /// How it lies in memory.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Rows in full tiles; all rows of a stock layout.
    fn tiled_rows(&self) -> usize {
        match self.layout {
            Layout::Stock(_) => self.rows,
            layout => self.parts.tiles * layout.tile_rows(),
        }
    }

    /// The rows past the last full tile, in the stock format.
    fn tail(&self) -> Result<MatrixRef<'a>> {
        let layout = Layout::Stock(self.layout.source());
        MatrixRef::new(
            layout,
            self.rows - self.tiled_rows(),
            self.cols,
            self.parts.tail,
        )
    }
}

/// Where results go, `[token][stride]`: threads write disjoint rows of it.
#[derive(Clone, Copy)]
pub struct Out<'a> {
    base: *mut f32,
    stride: usize,
    tokens: usize,
    owner: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: rows are written through `at` alone, whose contract gives each row to one thread.
unsafe impl Send for Out<'_> {}
// SAFETY: as above.
unsafe impl Sync for Out<'_> {}

impl<'a> Out<'a> {
    /// Results for `tokens` tokens of `stride` rows each.
    ///
    /// # Errors
    /// If `out` is shorter than that.
    pub fn new(out: &'a mut [f32], tokens: usize, stride: usize) -> Result<Self> {
        ensure!(
            tokens.checked_mul(stride).is_some_and(|n| n <= out.len()),
            "output: {} values, expected {tokens} tokens of {stride} rows",
            out.len()
        );
        Ok(Out {
            base: out.as_mut_ptr(),
            stride,
            tokens,
            owner: std::marker::PhantomData,
        })
    }

    /// The element of a token and a row.
    ///
    /// # Safety
    /// Both are inside the shape, and no other thread uses this row.
    #[inline(always)]
    unsafe fn at(self, token: usize, row: usize) -> *mut f32 {
        // SAFETY: inside the slice by the caller's contract and the check in `new`.
        unsafe { self.base.add(token * self.stride + row) }
    }

    /// The same results, starting at a later row.
    ///
    /// # Safety
    /// `row` is at most the stride; as for `at`, rows are counted from there.
    unsafe fn skip_rows(self, row: usize) -> Self {
        // SAFETY: at most one past the end of a row that is inside the slice.
        let base = unsafe { self.base.add(row) };
        Out { base, ..self }
    }
}

/// The inner function of a kernel: rows `tiles.start * tile_rows ..` of the tiled part, for every token of the groups.
///
/// # Safety
/// The CPU has the instruction set; the tiles are inside the matrix; the groups hold rows of at least its columns in the kernel's
/// [`Form`]; `out` has the rows and tokens, and these rows belong to this thread.
type TilesFn = unsafe fn(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out);

/// One way to multiply: a layout and an instruction set.
pub struct Kernel {
    layout: Layout,
    isa: Isa,
    form: Form,
    /// Whether this CPU can run it.
    usable: fn() -> bool,
    tiles: TilesFn,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name())
    }
}

impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        (self.layout, self.isa) == (other.layout, other.isa)
    }
}

impl Kernel {
    const fn ternary(layout: Layout, isa: Isa, usable: fn() -> bool, tiles: TilesFn) -> Self {
        Kernel {
            layout,
            isa,
            form: Form::Q8K,
            usable,
            tiles,
        }
    }

    /// The layout of its weights.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The instruction set.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// What its activations are quantized to.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Whether it multiplies rows of `cols` weights of this format.
    pub fn takes(&self, format: Format, cols: usize) -> bool {
        self.layout.source() == format && cols.is_multiple_of(self.layout.block_weights())
    }

    /// Where its machine code starts.
    pub fn code(&self) -> *const u8 {
        self.tiles as *const u8
    }

    /// `wide-row/avx512-vnni`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.layout.name(), self.isa)
    }

    fn check(&self, w: &MatrixRef, x: &Activations) -> Result<()> {
        ensure!(
            w.layout == self.layout,
            "{}: the weights are {:?}",
            self.name(),
            w.layout
        );
        ensure!(
            x.form() == self.form,
            "{}: the activations are {:?}, expected {:?}",
            self.name(),
            x.form(),
            self.form
        );
        ensure!(
            w.cols == x.cols(),
            "{}: weights of {} columns, activations of {}",
            self.name(),
            w.cols,
            x.cols()
        );
        Ok(())
    }

    /// `out[token][row] = w[row] . x[token]`, on this thread. `out` holds `x.tokens()` rows of `w.rows()` values.
    ///
    /// # Errors
    /// Layouts, forms or shapes that do not fit together.
    pub fn multiply(&self, w: &MatrixRef, x: &Activations, out: &mut [f32]) -> Result<()> {
        let out = Out::new(out, x.tokens(), w.rows)?;
        // SAFETY: `out` is borrowed mutably here: no other thread writes it.
        unsafe { self.multiply_rows(w, x, 0..w.rows, out) }
    }

    /// The rows `rows` of [`Kernel::multiply`]. In the tiled part a range starts and ends on tiles.
    ///
    /// # Errors
    /// As [`Kernel::multiply`]; a range outside the matrix or off the tiles.
    ///
    /// # Safety
    /// No other thread reads or writes these rows of `out` meanwhile.
    pub unsafe fn multiply_rows(
        &self,
        w: &MatrixRef,
        x: &Activations,
        rows: Range<usize>,
        out: Out,
    ) -> Result<()> {
        self.check(w, x)?;
        ensure!(
            rows.start <= rows.end
                && rows.end <= w.rows
                && rows.end <= out.stride
                && x.tokens() <= out.tokens,
            "{}: rows {rows:?} of {} and {} tokens into {} rows of {} tokens",
            self.name(),
            w.rows,
            x.tokens(),
            out.stride,
            out.tokens
        );
        let (height, tiled) = (w.layout.tile_rows(), w.tiled_rows());
        let end = rows.end.min(tiled);
        if rows.start < end {
            ensure!(
                rows.start.is_multiple_of(height) && end.is_multiple_of(height),
                "{}: rows {rows:?} do not start and end on tiles of {height}",
                self.name()
            );
            // SAFETY: checked above: shapes agree and the tiles are inside; rows are this thread's by contract.
            unsafe { (self.tiles)(w, x.groups(), rows.start / height..end / height, out) };
        }
        if rows.end > tiled {
            let start = rows.start.max(tiled);
            // SAFETY: `tiled` is at most the stride; the rows are this thread's by contract.
            unsafe {
                self.tail()?.multiply_rows(
                    &w.tail()?,
                    x,
                    start - tiled..rows.end - tiled,
                    out.skip_rows(tiled),
                )
            }
        } else {
            Ok(())
        }
    }

    /// The kernel for rows past the last full tile: stock, same instruction set, or the best below it.
    fn tail(&self) -> Result<&'static Kernel> {
        let stock = Layout::Stock(self.layout.source());
        match available()
            .filter(|k| k.layout == stock && k.isa <= self.isa)
            .last()
        {
            Some(kernel) => Ok(kernel),
            None => bail!("{}: no kernel for the rows past the last tile", self.name()),
        }
    }
}

static KERNELS: &[&[&[Kernel]]] = &[
    &[reference::KERNELS, float::KERNELS],
    #[cfg(target_arch = "x86_64")]
    x86::KERNELS,
    #[cfg(target_arch = "aarch64")]
    arm::KERNELS,
];

fn always() -> bool {
    true
}

/// Every kernel of this build, whether or not this CPU can run it: instruction sets slowest first, and in each the
/// layouts of a format slowest first.
pub fn all() -> impl Iterator<Item = &'static Kernel> {
    KERNELS.iter().copied().flatten().copied().flatten()
}

/// The kernels of [`all`] that this CPU can run.
pub fn available() -> impl Iterator<Item = &'static Kernel> {
    all().filter(|k| (k.usable)())
}

/// The kernels of [`available`] for weights that a file stores as `format`, one for each name: where two encodings share
/// one, the later, faster one.
pub fn named(format: Format) -> Vec<&'static Kernel> {
    let mut kernels: Vec<&'static Kernel> = Vec::new();
    for kernel in available().filter(|k| k.layout.source() == format) {
        match kernels.iter_mut().find(|k| k.name() == kernel.name()) {
            Some(same) => *same = kernel,
            None => kernels.push(kernel),
        }
    }
    kernels
}

/// What `--kernel` asks for: a layout, an instruction set, or both as `layout/isa`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    layout: Option<String>,
    isa: Option<Isa>,
}

impl std::str::FromStr for Choice {
    type Err = anyhow::Error;

    /// # Errors
    /// A name that no kernel of this build has, an instruction set that this CPU lacks.
    fn from_str(name: &str) -> Result<Self> {
        let mut choice = Choice::default();
        for part in name.split('/') {
            if let Some(isa) = Isa::ALL.into_iter().find(|i| i.name() == part) {
                ensure!(isa.available(), "--kernel {name}: this CPU has no {isa}");
                choice.isa = Some(isa);
            } else if all().any(|k| k.layout.name() == part) {
                choice.layout = Some(part.to_owned());
            } else {
                let mut layouts: Vec<_> = available().map(|k| k.layout.name()).collect();
                layouts.sort_unstable();
                layouts.dedup();
                let isas: Vec<_> = Isa::ALL
                    .into_iter()
                    .filter(|i| i.available())
                    .map(Isa::name)
                    .collect();
                bail!(
                    "--kernel {name}: found '{part}', expected layout/isa with a layout of {} and an instruction set of {}",
                    layouts.join(", "),
                    isas.join(", ")
                );
            }
        }
        Ok(choice)
    }
}

impl Choice {
    /// The fastest kernel that fits the choice for weights that a file stores as `format`.
    ///
    /// # Errors
    /// If none does.
    pub fn kernel(&self, format: Format) -> Result<&'static Kernel> {
        self.kernel_of(format, 0)
    }

    /// As [`Choice::kernel`], for rows of `cols` weights; 0 is a multiple of any block.
    ///
    /// # Errors
    /// As there.
    pub fn kernel_of(&self, format: Format, cols: usize) -> Result<&'static Kernel> {
        let fits = |k: &&Kernel| {
            k.takes(format, cols)
                && self.isa.is_none_or(|isa| k.isa == isa)
                && self.layout.as_deref().is_none_or(|name| {
                    k.layout.name() == name || name == "stock" && k.layout == Layout::Stock(format)
                })
        };
        match available().filter(fits).last() {
            Some(kernel) => Ok(kernel),
            None => bail!(
                "{format}: no kernel {}/{}",
                self.layout.as_deref().unwrap_or("*"),
                self.isa.map_or("*", Isa::name)
            ),
        }
    }

    /// The fastest kernel for a format, or rows, that the layout asked for does not take: any layout, and the instruction set or one
    /// before it.
    ///
    /// # Errors
    /// If there is none.
    pub fn kernel_or_below(&self, format: Format, cols: usize) -> Result<&'static Kernel> {
        let fits = |k: &&Kernel| k.takes(format, cols) && self.isa.is_none_or(|isa| k.isa <= isa);
        match available().filter(fits).last() {
            Some(kernel) => Ok(kernel),
            None => bail!("{format}: no kernel for this CPU"),
        }
    }
}

#[cfg(test)]
mod tests;
