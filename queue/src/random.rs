//! Randomness from the operating system: for epochs, passwords and jitter.

use crate::Error;

fn fill(buffer: &mut [u8]) -> Result<(), Error> {
    getrandom::fill(buffer)
        .map_err(|error| Error::Config { detail: format!("the system provides no random numbers: {error}") })
}

/// 128 bits in hexadecimal.
pub(crate) fn hex() -> Result<String, Error> {
    let mut buffer = [0; 16];
    fill(&mut buffer)?;
    Ok(to_hex(&buffer))
}

/// A number from 0 to 1, in decimal, in the form that scripts read.
pub(crate) fn fraction() -> Result<String, Error> {
    let mut buffer = [0; 2];
    fill(&mut buffer)?;
    Ok((f64::from(u16::from_be_bytes(buffer)) / f64::from(u16::MAX)).to_string())
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
