//! A sample filter: reads the image of one file and writes `thumbnail.png`, at most 256 pixels wide and high.
//!
//! It knows nothing of Kubernetes, queues or buckets: a file comes in, a file goes out, and the exit code
//! reports success or failure. Every filter works like this.

use std::{env, error::Error, fs, path::PathBuf, process::ExitCode};

use image::{DynamicImage, ImageFormat, ImageReader, Limits};

/// The longer side of a thumbnail, in pixels.
const SIDE: u32 = 256;
/// A picture may claim to be a hundred times larger than its file: refuse before spending memory on it.
const MEMORY_MAX: u64 = 256 << 20;

fn main() -> ExitCode {
    match run() {
        Ok(written) => {
            println!("wrote {}", written.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("thumbnail: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<PathBuf, Box<dyn Error>> {
    let input = env::var("SOURCE_PATH").unwrap_or_else(|_| "/ws/input".to_owned());
    let filter = env::var("OPENFILTER_FILTER").unwrap_or_else(|_| "thumbnail".to_owned());
    let output = PathBuf::from(env::var("OUTPUT_PATH").unwrap_or_else(|_| format!("/ws/out/{filter}")));
    // The input has no extension, so its first bytes decide its format.
    let mut reader =
        ImageReader::open(&input).map_err(|error| format!("{input}: {error}"))?.with_guessed_format()?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MEMORY_MAX);
    reader.limits(limits);
    let picture = reader.decode().map_err(|error| format!("{input} is not a picture: {error}"))?;
    fs::create_dir_all(&output).map_err(|error| format!("{}: {error}", output.display()))?;
    let file = output.join("thumbnail.png");
    shrink(picture).save_with_format(&file, ImageFormat::Png)?;
    Ok(file)
}

/// Keeps a small picture as it is: enlarging it would only add bytes.
fn shrink(picture: DynamicImage) -> DynamicImage {
    let fits = picture.width() <= SIDE && picture.height() <= SIDE;
    if fits { picture } else { picture.thumbnail(SIDE, SIDE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_pictures_shrink_and_small_ones_stay_as_they_are() {
        let side = |width, height| {
            let small = shrink(DynamicImage::new_rgb8(width, height));
            (small.width(), small.height())
        };
        assert_eq!(side(640, 480), (256, 192));
        assert_eq!(side(100, 512), (50, 256));
        assert_eq!(side(80, 48), (80, 48));
    }
}
