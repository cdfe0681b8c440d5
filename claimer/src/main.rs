//! The claimer: see the library.

use std::time::Instant;

fn main() {
    let started = Instant::now();
    // Only fails when one is installed already, which is as good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let code = match runtime {
        Ok(runtime) => runtime.block_on(claimer::run(std::env::args_os(), started)),
        Err(error) => {
            eprintln!("start: {error}");
            protocol::Exit::LocalIo.code()
        }
    };
    // Not a return: that would wait for a name lookup or a write that hangs.
    std::process::exit(code)
}
