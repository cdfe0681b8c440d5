//! `make gen`: writes the generated files that have changed.
#![allow(clippy::unwrap_used, reason = "a generator that cannot write stops, loudly")]

use std::fs;

fn main() {
    for file in generator::all() {
        if file.drift().is_none() {
            continue;
        }
        let path = generator::root().join(&file.path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &file.content).unwrap();
        println!("wrote {}", file.path.display());
    }
}
