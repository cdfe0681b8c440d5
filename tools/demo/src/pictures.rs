//! Three dozen generated pictures, the same every time, as two cameras might have stored them; and one file
//! that was cut off during its upload.

use std::io::Cursor;

use image::{ImageFormat, ImageResult, RgbImage};

use crate::paint::paint;

/// A file of the bucket, below the Pipeline's prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// `north/IMG_2041.jpg`
    pub name: String,
    /// Its content.
    pub content: Vec<u8>,
}

/// The number of pictures, without the broken one.
pub const COUNT: usize = 36;
/// The file that no filter can read.
pub const BROKEN: &str = "north/IMG_2019.jpg";
/// The file ends within the tables that a decoder needs before the first pixel.
const BROKEN_BYTES: usize = 160;

/// All files of the cameras, the broken one last.
pub fn all() -> ImageResult<Vec<Picture>> {
    let mut pictures = (0..COUNT).map(picture).collect::<ImageResult<Vec<_>>>()?;
    let mut content = encode(&paint(0), ImageFormat::Jpeg)?;
    content.truncate(BROKEN_BYTES);
    pictures.push(Picture { name: BROKEN.to_owned(), content });
    Ok(pictures)
}

/// The northern camera stores JPEG, the southern one PNG.
fn picture(index: usize) -> ImageResult<Picture> {
    let (extension, format) = match index % 2 {
        0 => ("jpg", ImageFormat::Jpeg),
        _ => ("png", ImageFormat::Png),
    };
    Ok(Picture { name: format!("{}.{extension}", title(index)), content: encode(&paint(index), format)? })
}

/// The name of a picture without its extension: `north/IMG_2041`.
pub fn title(index: usize) -> String {
    let number = index / 2;
    match index % 2 {
        0 => format!("north/IMG_{}", 2_001 + number),
        _ => format!("south/DSC_{:04}", 417 + number),
    }
}

/// The average size of the files in bytes.
pub fn average_size(pictures: &[Picture]) -> usize {
    total_size(pictures) / pictures.len().max(1)
}

/// The total size of all files in bytes.
pub fn total_size(pictures: &[Picture]) -> usize {
    pictures.iter().map(|picture| picture.content.len()).sum()
}

/// Encodes a picture as a file.
pub fn encode(picture: &RgbImage, format: ImageFormat) -> ImageResult<Vec<u8>> {
    let mut file = Cursor::new(Vec::new());
    picture.write_to(&mut file, format)?;
    Ok(file.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_can_be_read_but_the_broken_one() {
        let pictures = all().unwrap();
        let readable = |picture: &&Picture| image::load_from_memory(&picture.content).is_ok();
        assert_eq!(pictures.iter().filter(readable).count(), COUNT);
        let broken: Vec<_> = pictures.iter().filter(|picture| !readable(picture)).collect();
        assert_eq!(broken.len(), 1);
        assert_eq!(broken[0].name, BROKEN);
        assert!(image::guess_format(&broken[0].content).is_ok(), "it begins as a picture");
    }

    #[test]
    fn no_two_have_the_same_name_or_content() {
        let pictures = all().unwrap();
        let names: BTreeSet<_> = pictures.iter().map(|picture| &picture.name).collect();
        let contents: BTreeSet<_> = pictures.iter().map(|picture| &picture.content).collect();
        assert_eq!((names.len(), contents.len()), (COUNT + 1, COUNT + 1));
    }

    #[test]
    fn they_are_the_same_every_time() {
        assert_eq!(picture(4).unwrap(), picture(4).unwrap());
    }
}
