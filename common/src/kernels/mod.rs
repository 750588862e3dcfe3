//! Arithmetic on blocks: a scalar reference, and one folder an architecture, one file an instruction set.
