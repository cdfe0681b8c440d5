//! The cli.
fn main() {}
