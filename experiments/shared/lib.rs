//! What several experiments need of `common` together: it joins lab, which knows no kernels, with kernels that know no lab.

pub mod contest;
pub mod decode;
pub mod dense;
pub mod prompts;
pub mod replay;
pub mod weights;
