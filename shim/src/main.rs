//! The shim: see the library.

fn main() {
    std::process::exit(i32::from(shim::run(std::env::args_os().skip(1))))
}
