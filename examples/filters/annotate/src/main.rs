//! A sample filter: frames an image and writes the file's name and its main colours below it.
//!
//! As the second filter of a Pipeline, it reads the first one's output: the Pipeline sets `SOURCE_PATH` to
//! `/ws/out/<first>/<file>`. The name comes from `/ws/input.source_uri`, which every filter can read.

use std::{env, error::Error, fs, path::PathBuf, process::ExitCode};

use image::{ImageFormat, ImageReader, Limits};

/// A picture may claim to be a hundred times larger than its file: refuse before spending memory on it.
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
