//! Measuring: interleaved rounds, statistics, machine facts, result rows, claims.
