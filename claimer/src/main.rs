//! The claimer: see the library.

use std::time::Instant;

fn main() {
    let started = Instant::now();
    // This fails only if a provider is already installed, which is fine.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let code = match runtime {
        Ok(runtime) => runtime.block_on(claimer::run(std::env::args_os(), started)),
        Err(error) => {
            eprintln!("cannot start: {error}");
            protocol::Exit::LocalIo.code()
        }
    };
    // Returning instead would wait for a name lookup or a write that hangs.
    std::process::exit(code)
}
