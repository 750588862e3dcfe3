//! Any bytes as a CSV of results: refused, or records that read back the same.

use common::lab::{read_csv, split_params, write_csv};

pub fn check(bytes: &[u8]) {
    let Ok(records) = read_csv(bytes) else {
        return;
    };
    for record in &records {
        split_params(&record.params).expect("checked when it was read");
        let _ = (record.key().to_string(), record.baseline_parts());
    }
    let written = write_csv(&records).expect("records that were read");
    assert_eq!(read_csv(&written).expect("what was written"), records);
}
