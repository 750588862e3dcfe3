//! ggml's matrix product on its CPU backend.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use anyhow::{Context, Result, bail, ensure};
use common::formats::Format;
use llama_cpp_sys_2 as sys;

/// Refuses a ggml that was not compiled for this CPU: its rates would mean nothing.
///
/// # Errors
/// If this CPU has an instruction set that ggml was compiled without.
pub fn check_build() -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: plain queries without arguments.
        let (avx2, vnni) = unsafe { (sys::ggml_cpu_has_avx2(), sys::ggml_cpu_has_avx512_vnni()) };
        let built = "llama.cpp was built without it; expected RUSTFLAGS=-Ctarget-cpu=native, as just peers sets";
        ensure!(
            avx2 != 0 || !is_x86_feature_detected!("avx2"),
            "this CPU has AVX2: {built}"
        );
        ensure!(
            vnni != 0 || !is_x86_feature_detected!("avx512vnni"),
            "this CPU has AVX-512 VNNI: {built}"
        );
    }
    Ok(())
}

/// ggml's CPU backend with threads that stay.
pub struct Cpu {
    backend: NonNull<sys::ggml_backend>,
    pool: NonNull<sys::ggml_threadpool>,
}

impl Cpu {
    /// A backend with `threads` threads, the caller's included.
    ///
    /// # Errors
    /// If ggml gives none.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = i32::try_from(threads).context("threads")?;
        // SAFETY: the parameters outlive the call; both handles are checked.
        unsafe {
            let backend =
                NonNull::new(sys::ggml_backend_cpu_init()).context("ggml: no CPU backend")?;
            let mut params = sys::ggml_threadpool_params_default(threads);
            // Between graphs its threads would otherwise go on spinning, on the cores that our kernels are measured on.
            params.poll = 0;
            let Some(pool) = NonNull::new(sys::ggml_threadpool_new(&mut params)) else {
                sys::ggml_backend_free(backend.as_ptr());
                anyhow::bail!("ggml: no pool of {threads} threads");
            };
            sys::ggml_backend_cpu_set_n_threads(backend.as_ptr(), threads);
            sys::ggml_backend_cpu_set_threadpool(backend.as_ptr(), pool.as_ptr());
            Ok(Cpu { backend, pool })
        }
    }

    /// The buffer types that libllama tries for a weight, in its order: those that repack, then plain memory.
    fn buffer_types(&self) -> Vec<sys::ggml_backend_buffer_type_t> {
        type GetBuffers =
            unsafe extern "C" fn(sys::ggml_backend_dev_t) -> *mut sys::ggml_backend_buffer_type_t;
        let mut types = Vec::new();
        // SAFETY: the registry's function of that name has this type; its list ends with a null.
        unsafe {
            let device = sys::ggml_backend_get_device(self.backend.as_ptr());
            let registry = sys::ggml_backend_dev_backend_reg(device);
            let name = c"ggml_backend_dev_get_extra_bufts".as_ptr();
            let get = sys::ggml_backend_reg_get_proc_address(registry, name);
            if !get.is_null() {
                let mut list = std::mem::transmute::<*mut c_void, GetBuffers>(get)(device);
                while !list.is_null() && !(*list).is_null() {
                    types.push(*list);
                    list = list.add(1);
                }
            }
            types.push(sys::ggml_backend_cpu_buffer_type());
        }
        types
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        // SAFETY: both came from `new` and are freed once; products borrow this value, so none is left.
        unsafe {
            sys::ggml_backend_free(self.backend.as_ptr());
            sys::ggml_threadpool_free(self.pool.as_ptr());
        }
    }
}

/// What a product allocated, freed in reverse order.
#[derive(Default)]
struct Owned {
    contexts: Vec<NonNull<sys::ggml_context>>,
    buffers: Vec<NonNull<sys::ggml_backend_buffer>>,
}

impl Owned {
    /// A context for `tensors` tensors without data and a graph.
    fn context(&mut self, tensors: usize) -> Result<*mut sys::ggml_context> {
        // SAFETY: ggml allocates the memory itself.
        let context = unsafe {
            sys::ggml_init(sys::ggml_init_params {
                mem_size: sys::ggml_tensor_overhead() * tensors
                    + sys::ggml_graph_overhead_custom(tensors, false),
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        let context = NonNull::new(context).context("ggml: no memory for a context")?;
        self.contexts.push(context);
        Ok(context.as_ptr())
    }

    /// Memory for all tensors of a context.
    fn allocate(
        &mut self,
        context: *mut sys::ggml_context,
        kind: sys::ggml_backend_buffer_type_t,
    ) -> Result<()> {
        // SAFETY: a live context and a buffer type of ggml.
        let buffer = unsafe { sys::ggml_backend_alloc_ctx_tensors_from_buft(context, kind) };
        self.buffers
            .push(NonNull::new(buffer).context("ggml: no memory for tensors")?);
        Ok(())
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: each came from ggml and is freed once.
        unsafe {
            for buffer in &self.buffers {
                sys::ggml_backend_buffer_free(buffer.as_ptr());
            }
            for context in &self.contexts {
                sys::ggml_free(context.as_ptr());
            }
        }
    }
}

/// A weight matrix in ggml, and a graph that multiplies it by a batch of f32 activations.
pub struct Product<'c> {
    cpu: &'c Cpu,
    graph: NonNull<sys::ggml_cgraph>,
    x: NonNull<sys::ggml_tensor>,
    y: NonNull<sys::ggml_tensor>,
    buffer: String,
    _owned: Owned,
}

impl<'c> Product<'c> {
    /// `rows` x `cols` weights in a format, `tokens` columns of activations; a run multiplies `repeat` times. The weights
    /// lie where libllama would put them: in ggml's first buffer type that has a product of their format.
    ///
    /// # Errors
    /// Weights that do not fill the shape; whatever ggml refuses.
    pub fn new(
        cpu: &'c Cpu,
        format: Format,
        (rows, cols): (usize, usize),
        tokens: usize,
        repeat: usize,
        weights: &[u8],
    ) -> Result<Self> {
        let expected = format.matrix_bytes(rows, cols)?;
        ensure!(
            weights.len() == expected,
            "weights: {} bytes, expected {expected}",
            weights.len()
        );
        for kind in cpu.buffer_types() {
            let shape = (rows, cols);
            let Some((product, w)) = Self::build(cpu, format, shape, tokens, repeat, kind)? else {
                continue;
            };
            // SAFETY: the tensor has exactly these bytes, as checked above.
            unsafe {
                sys::ggml_backend_tensor_set(w.as_ptr(), weights.as_ptr().cast(), 0, weights.len())
            };
            return Ok(product);
        }
        bail!("ggml: no product of {}", format.name())
    }

    /// None where the buffer type has no such product.
    fn build(
        cpu: &'c Cpu,
        format: Format,
        (rows, cols): (usize, usize),
        tokens: usize,
        repeat: usize,
        kind: sys::ggml_backend_buffer_type_t,
    ) -> Result<Option<(Self, NonNull<sys::ggml_tensor>)>> {
        let (rows, cols, tokens) = (rows as i64, cols as i64, tokens as i64);
        let mut owned = Owned::default();
        let weights = owned.context(2)?;
        let context = owned.context(repeat + 8)?;
        // SAFETY: tensors belong to their contexts, which `owned` keeps; ggml aborts rather than return null.
        unsafe {
            let w =
                sys::ggml_new_tensor_2d(weights, format.ggml_id() as sys::ggml_type, cols, rows);
            owned.allocate(weights, kind)?;
            let x = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_F32, cols, tokens);
            let graph = sys::ggml_new_graph_custom(context, repeat + 8, false);
            let mut y = std::ptr::null_mut();
            for _ in 0..repeat {
                y = sys::ggml_mul_mat(context, w, x);
                sys::ggml_build_forward_expand(graph, y);
            }
            let device = sys::ggml_backend_get_device(cpu.backend.as_ptr());
            if !sys::ggml_backend_dev_supports_op(device, y) {
                return Ok(None);
            }
            owned.allocate(context, sys::ggml_backend_cpu_buffer_type())?;
            let product = Product {
                cpu,
                graph: NonNull::new(graph).context("ggml: no graph")?,
                x: NonNull::new(x).context("ggml: no tensor")?,
                y: NonNull::new(y).context("ggml: no tensor")?,
                buffer: CStr::from_ptr(sys::ggml_backend_buft_name(kind))
                    .to_string_lossy()
                    .into_owned(),
                _owned: owned,
            };
            Ok(Some((product, NonNull::new(w).context("ggml: no tensor")?)))
        }
    }

    /// ggml's name of the memory that the weights lie in, which decides on the kernel.
    pub fn buffer(&self) -> &str {
        &self.buffer
    }

    /// Sets the activations, `[token][cols]`.
    ///
    /// # Errors
    /// If there are more or fewer than the shape holds.
    pub fn set(&mut self, x: &[f32]) -> Result<()> {
        // SAFETY: a live tensor.
        let bytes = unsafe { sys::ggml_nbytes(self.x.as_ptr()) };
        ensure!(
            size_of_val(x) == bytes,
            "activations: {} bytes, expected {bytes}",
            size_of_val(x)
        );
        // SAFETY: exactly the tensor's bytes.
        unsafe { sys::ggml_backend_tensor_set(self.x.as_ptr(), x.as_ptr().cast(), 0, bytes) };
        Ok(())
    }

    /// Computes the products.
    ///
    /// # Errors
    /// If ggml fails.
    pub fn run(&mut self) -> Result<()> {
        // SAFETY: backend and graph are live, and every tensor of the graph has memory.
        let status = unsafe {
            sys::ggml_backend_graph_compute(self.cpu.backend.as_ptr(), self.graph.as_ptr())
        };
        ensure!(status == sys::GGML_STATUS_SUCCESS, "ggml: status {status}");
        Ok(())
    }

    /// The result of the last run, `[token][rows]`.
    pub fn output(&self) -> Vec<f32> {
        // SAFETY: the buffer has the tensor's size.
        unsafe {
            let bytes = sys::ggml_nbytes(self.y.as_ptr());
            let mut out = vec![0.0_f32; bytes / size_of::<f32>()];
            sys::ggml_backend_tensor_get(self.y.as_ptr(), out.as_mut_ptr().cast(), 0, bytes);
            out
        }
    }
}
