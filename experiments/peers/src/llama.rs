//! A model running in libllama, on the CPU, with the settings of the reference in `models/reference.json`: an f32 KV cache, no
//! flash attention.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use llama_cpp_sys_2 as sys;

/// Errors go to standard error, the rest nowhere.
unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if level == sys::GGML_LOG_LEVEL_ERROR && !text.is_null() {
        // SAFETY: ggml passes a string that ends with 0.
        eprint!("{}", unsafe { CStr::from_ptr(text) }.to_string_lossy());
    }
}

/// A loaded model with one context.
pub struct Llama {
    model: NonNull<sys::llama_model>,
    context: NonNull<sys::llama_context>,
    capacity: usize,
    vocabulary: usize,
    used: usize,
}

impl Llama {
    /// Loads a file; ggml repacks the weights it has a layout for. `capacity` is the most tokens the context holds.
    ///
    /// # Errors
    /// A file that libllama refuses.
    pub fn open(path: &Path, threads: usize, capacity: usize) -> Result<Self> {
        let shown = path.display();
        let name = path
            .to_str()
            .with_context(|| format!("{shown}: not UTF-8"))?;
        let name = CString::new(name)?;
        let (threads, size) = (i32::try_from(threads)?, u32::try_from(capacity)?);
        // SAFETY: parameters start from libllama's defaults and outlive the calls; handles are checked.
        unsafe {
            sys::llama_log_set(Some(log), std::ptr::null_mut());
            sys::llama_backend_init();
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers = 0;
            let model = sys::llama_model_load_from_file(name.as_ptr(), params);
            let model =
                NonNull::new(model).with_context(|| format!("{shown}: libllama refuses it"))?;
            let mut params = sys::llama_context_default_params();
            params.n_ctx = size;
            params.n_batch = size;
            params.n_ubatch = size.min(512);
            params.n_threads = threads;
            params.n_threads_batch = threads;
            params.flash_attn_type = sys::LLAMA_FLASH_ATTN_TYPE_DISABLED;
            params.type_k = sys::GGML_TYPE_F32;
            params.type_v = sys::GGML_TYPE_F32;
            params.no_perf = true;
            let Some(context) = NonNull::new(sys::llama_init_from_model(model.as_ptr(), params))
            else {
                sys::llama_model_free(model.as_ptr());
                anyhow::bail!("{shown}: libllama gives no context of {capacity} tokens");
            };
            let vocabulary = sys::llama_vocab_n_tokens(sys::llama_model_get_vocab(model.as_ptr()));
            Ok(Llama {
                model,
                context,
                capacity,
                vocabulary: usize::try_from(vocabulary)?,
                used: 0,
            })
        }
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        // SAFETY: a live context.
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(self.context.as_ptr()), true) };
        self.used = 0;
    }

    /// Appends tokens; logits are kept for each if `all`, else for the last.
    ///
    /// # Errors
    /// No tokens, more than the context holds, ids outside the vocabulary, a failure of libllama.
    pub fn decode(&mut self, ids: &[u32], all: bool) -> Result<()> {
        ensure!(
            !ids.is_empty() && self.used + ids.len() <= self.capacity,
            "tokens: {} after {}, expected at least one and at most {} in all",
            ids.len(),
            self.used,
            self.capacity
        );
        if let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocabulary) {
            anyhow::bail!("token {id}: the vocabulary has {}", self.vocabulary);
        }
        // SAFETY: the batch has room for every token; it is freed after its last use.
        let status = unsafe {
            let mut batch = sys::llama_batch_init(ids.len() as i32, 0, 1);
            batch.n_tokens = ids.len() as i32;
            for (i, &id) in ids.iter().enumerate() {
                *batch.token.add(i) = id as sys::llama_token;
                *batch.pos.add(i) = (self.used + i) as sys::llama_pos;
                *batch.n_seq_id.add(i) = 1;
                **batch.seq_id.add(i) = 0;
                *batch.logits.add(i) = i8::from(all || i + 1 == ids.len());
            }
            let status = sys::llama_decode(self.context.as_ptr(), batch);
            sys::llama_batch_free(batch);
            status
        };
        ensure!(status == 0, "libllama: decode gives {status}");
        self.used += ids.len();
        Ok(())
    }

    /// Logits of the last token.
    ///
    /// # Errors
    /// If nothing was decoded.
    pub fn logits(&self) -> Result<&[f32]> {
        // SAFETY: libllama keeps them, one for each token of the vocabulary, until the next decode, which takes `&mut self`.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.context.as_ptr(), -1);
            let logits = NonNull::new(logits).context("libllama: no logits")?;
            Ok(std::slice::from_raw_parts(logits.as_ptr(), self.vocabulary))
        }
    }

    /// The `n` ids of largest logit after a prompt, or fewer before an end token.
    ///
    /// # Errors
    /// As [`Llama::decode`].
    pub fn greedy(&mut self, prompt: &[u32], n: usize) -> Result<Vec<u32>> {
        self.clear();
        let mut ids = Vec::new();
        let mut next = prompt.to_vec();
        while ids.len() < n {
            self.decode(&next, false)?;
            let logits = self.logits()?;
            // The first of the largest, as ties are broken everywhere here.
            let best = (1..logits.len())
                .fold(0, |best, v| if logits[v] > logits[best] { v } else { best });
            // SAFETY: a live model's vocabulary.
            let ends = unsafe {
                let vocabulary = sys::llama_model_get_vocab(self.model.as_ptr());
                sys::llama_vocab_is_eog(vocabulary, best as sys::llama_token)
            };
            if ends {
                break;
            }
            ids.push(best as u32);
            next = vec![best as u32];
        }
        Ok(ids)
    }
}

impl Drop for Llama {
    fn drop(&mut self) {
        // SAFETY: both came from `open` and are freed once, the context before its model.
        unsafe {
            sys::llama_free(self.context.as_ptr());
            sys::llama_model_free(self.model.as_ptr());
        }
    }
}
