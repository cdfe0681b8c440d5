//! A sample filter: frames an image and writes below it what the file is called and which colours it has.
//!
//! As a second filter it reads what the first one wrote: the Pipeline sets `SOURCE_PATH` to `/ws/out/<first>/<file>`.
//! The name comes from `/ws/input.source_uri`, which is there for every filter.

use std::{env, error::Error, fs, path::PathBuf, process::ExitCode};

use image::{ImageFormat, ImageReader, Limits};

/// A picture may say that it is a hundred times larger than its file: refuse before memory is spent on it.
const MEMORY_MAX: u64 = 256 << 20;

fn main() -> ExitCode {
    match run() {
        Ok(written) => {
            println!("wrote {}", written.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("annotate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<PathBuf, Box<dyn Error>> {
    let setting = |name: &str, otherwise: &str| env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    let input = setting("SOURCE_PATH", "/ws/input");
    let filter = setting("OPENFILTER_FILTER", "annotate");
    let output = PathBuf::from(setting("OUTPUT_PATH", &format!("/ws/out/{filter}")));
    let uri = setting("SOURCE_URI_FILE", "/ws/input.source_uri");
    let uri = fs::read_to_string(&uri).map_err(|error| format!("{uri}: {error}"))?;
    let mut reader =
        ImageReader::open(&input).map_err(|error| format!("{input}: {error}"))?.with_guessed_format()?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MEMORY_MAX);
    reader.limits(limits);
    let picture = reader.decode().map_err(|error| format!("{input} is not a picture: {error}"))?;
    let card = annotate::card(&picture.to_rgb8(), annotate::file_name(&uri));
    fs::create_dir_all(&output).map_err(|error| format!("{}: {error}", output.display()))?;
    let file = output.join("annotated.png");
    card.save_with_format(&file, ImageFormat::Png)?;
    Ok(file)
}
