//! Portable loops compiled once more for the wider vectors that a CPU has.

/// Defines functions that run compiled for AVX2 where the CPU has it. What they call must be `#[inline(always)]`.
macro_rules! widened {
    ($($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        $vis fn $name($($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the CPU has it.
                return unsafe { avx2($($arg),*) };
            }
            body($($arg),*);
        }
    )*};
}
pub(crate) use widened;
