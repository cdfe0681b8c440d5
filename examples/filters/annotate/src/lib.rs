//! A picture in a white frame, with its name and its main colours below it.

pub mod font;

use std::collections::BTreeMap;

use image::{Rgb, RgbImage, imageops};

/// Width of the white frame, in pixels.
pub const FRAME: u32 = 8;
/// Height of the part below the picture: the name, and a strip of colours.
pub const CAPTION: u32 = 36;

/// Pixels of the card for each dot of the font.
const TEXT_SCALE: u32 = 2;
/// Distance between the picture and the strip.
const STRIP_TOP: u32 = 4;
const STRIP_HEIGHT: u32 = 6;
/// More colours would be too thin to see.
const COLOURS_MAX: usize = 8;
const PAPER: Rgb<u8> = Rgb([250, 249, 246]);
const INK: Rgb<u8> = Rgb([45, 48, 56]);

/// The picture with frame, name and colours.
pub fn card(picture: &RgbImage, name: &str) -> RgbImage {
    let (width, height) = picture.dimensions();
    let mut card = RgbImage::from_pixel(width + 2 * FRAME, height + FRAME + CAPTION, PAPER);
    imageops::replace(&mut card, picture, FRAME.into(), FRAME.into());
    let below = FRAME + height;
    strip(&mut card, (FRAME, below + STRIP_TOP), width, &main_colours(picture));
    let text = font::fit(name, TEXT_SCALE, width);
    let strip_end = STRIP_TOP + STRIP_HEIGHT;
    let text_top = below + strip_end + (CAPTION - strip_end - font::HEIGHT * TEXT_SCALE) / 2;
    font::draw(&mut card, (FRAME, text_top), &text, TEXT_SCALE, INK);
    card
}

/// The last part of `s3://bucket/folder/name`.
pub fn file_name(uri: &str) -> &str {
    uri.rsplit('/').next().unwrap_or(uri)
}

/// The most frequent colours of the picture with their numbers of pixels, most frequent first. Similar
/// colours count as one, which is their average.
fn main_colours(picture: &RgbImage) -> Vec<(Rgb<u8>, u64)> {
    let mut found: BTreeMap<[u8; 3], (u64, [u64; 3])> = BTreeMap::new();
    for pixel in picture.pixels() {
        let similar = pixel.0.map(|channel| channel / 64);
        let (count, sums) = found.entry(similar).or_default();
        *count += 1;
        for (sum, channel) in sums.iter_mut().zip(pixel.0) {
            *sum += u64::from(channel);
        }
    }
    let average =
        |count: u64, sums: [u64; 3]| Rgb(sums.map(|sum| u8::try_from(sum / count).unwrap_or(u8::MAX)));
    let mut colours: Vec<_> =
        found.into_values().map(|(count, sums)| (average(count, sums), count)).collect();
    colours.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    colours.truncate(COLOURS_MAX);
    colours
}

/// A strip in which each colour is as wide as its share.
fn strip(card: &mut RgbImage, (left, top): (u32, u32), width: u32, colours: &[(Rgb<u8>, u64)]) {
    let all: u64 = colours.iter().map(|(_, count)| count).sum();
    for column in 0..width {
        let mut before = u64::from(column) * all / u64::from(width);
        let colour = colours.iter().find(|(_, count)| match before.checked_sub(*count) {
            Some(rest) => {
                before = rest;
                false
            }
            None => true,
        });
        let Some((colour, _)) = colour else { continue };
        for row in 0..STRIP_HEIGHT {
            card.put_pixel(left + column, top + row, *colour);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLUE: Rgb<u8> = Rgb([20, 40, 200]);
    const SAND: Rgb<u8> = Rgb([220, 200, 150]);

    /// Three quarters blue above one quarter sand.
    fn beach() -> RgbImage {
        RgbImage::from_fn(80, 40, |_, y| if y < 30 { BLUE } else { SAND })
    }

    #[test]
    fn the_picture_is_unchanged_inside_its_frame() {
        let card = card(&beach(), "IMG_1.jpg");
        assert_eq!(card.dimensions(), (80 + 2 * FRAME, 40 + FRAME + CAPTION));
        assert_eq!(*imageops::crop_imm(&card, FRAME, FRAME, 80, 40).to_image(), *beach());
        assert_eq!(*card.get_pixel(FRAME - 1, 20), PAPER);
    }

    #[test]
    fn the_strip_shows_each_colour_by_its_share() {
        assert_eq!(main_colours(&beach()), [(BLUE, 2_400), (SAND, 800)]);
        let card = card(&beach(), "");
        let strip: Vec<_> = (0..80).map(|x| *card.get_pixel(FRAME + x, FRAME + 40 + STRIP_TOP)).collect();
        assert_eq!(strip.iter().filter(|pixel| **pixel == BLUE).count(), 60);
        assert_eq!(strip.iter().filter(|pixel| **pixel == SAND).count(), 20);
    }

    #[test]
    fn the_name_is_written_and_another_name_looks_different() {
        let (one, other, none) = (card(&beach(), "A"), card(&beach(), "B"), card(&beach(), ""));
        assert_ne!(one, none);
        assert_ne!(one, other);
    }

    #[test]
    fn a_picture_of_one_pixel_has_room_for_a_long_name() {
        let tiny = RgbImage::from_pixel(1, 1, SAND);
        assert_eq!(card(&tiny, &"x".repeat(1_000)).dimensions(), (1 + 2 * FRAME, 1 + FRAME + CAPTION));
    }

    #[test]
    fn a_file_is_called_by_the_last_part_of_its_uri() {
        assert_eq!(file_name("s3://bucket/camera/north/IMG_1.jpg"), "IMG_1.jpg");
        assert_eq!(file_name("IMG_1.jpg"), "IMG_1.jpg");
    }
}
