//! Reads small files, once for each file of the run.

use std::{fs::File, io, io::Read, path::Path};

/// Longer than any file that is read this way: an object's key has at most 1,024 bytes.
const SMALL_BYTES_MAX: usize = 4 * 1024;

/// Reads a small file in one call: std would first ask for its length, and read once more for its end.
pub(crate) fn read_small(path: impl AsRef<Path>) -> io::Result<String> {
    let mut bytes = [0; SMALL_BYTES_MAX];
    let length = File::open(path)?.read(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}
