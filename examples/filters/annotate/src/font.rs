//! Capital letters, digits and a few signs, five dots wide and seven high: enough to write a file's name
//! without a font file. Small letters are drawn as capitals, and characters that are not in the table as a
//! box.

use image::{Rgb, RgbImage};

/// Width of a character in dots.
pub const WIDTH: u32 = 5;
/// Height of a character in dots.
pub const HEIGHT: u32 = 7;
/// Width of a character and the dot that separates it from the next one.
const ADVANCE: u32 = WIDTH + 1;

/// Rows of a character, from top to bottom; the lowest five bits are its dots.
type Glyph = [u8; HEIGHT as usize];

const BOX: Glyph = [0b11111, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b11111];

#[rustfmt::skip]
const GLYPHS: [(char, Glyph); 47] = [
    (' ', [0, 0, 0, 0, 0, 0, 0]),
    ('A', [0b01110, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001]),
    ('B', [0b11110, 0b10001, 0b10001, 0b11110, 0b10001, 0b10001, 0b11110]),
    ('C', [0b01110, 0b10001, 0b10000, 0b10000, 0b10000, 0b10001, 0b01110]),
    ('D', [0b11110, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b11110]),
    ('E', [0b11111, 0b10000, 0b10000, 0b11110, 0b10000, 0b10000, 0b11111]),
    ('F', [0b11111, 0b10000, 0b10000, 0b11110, 0b10000, 0b10000, 0b10000]),
    ('G', [0b01110, 0b10001, 0b10000, 0b10111, 0b10001, 0b10001, 0b01111]),
    ('H', [0b10001, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001]),
    ('I', [0b01110, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110]),
    ('J', [0b00111, 0b00010, 0b00010, 0b00010, 0b00010, 0b10010, 0b01100]),
    ('K', [0b10001, 0b10010, 0b10100, 0b11000, 0b10100, 0b10010, 0b10001]),
    ('L', [0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b11111]),
    ('M', [0b10001, 0b11011, 0b10101, 0b10101, 0b10001, 0b10001, 0b10001]),
    ('N', [0b10001, 0b11001, 0b10101, 0b10011, 0b10001, 0b10001, 0b10001]),
    ('O', [0b01110, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110]),
    ('P', [0b11110, 0b10001, 0b10001, 0b11110, 0b10000, 0b10000, 0b10000]),
    ('Q', [0b01110, 0b10001, 0b10001, 0b10001, 0b10101, 0b10010, 0b01101]),
    ('R', [0b11110, 0b10001, 0b10001, 0b11110, 0b10100, 0b10010, 0b10001]),
    ('S', [0b01111, 0b10000, 0b10000, 0b01110, 0b00001, 0b00001, 0b11110]),
    ('T', [0b11111, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100]),
    ('U', [0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01110]),
    ('V', [0b10001, 0b10001, 0b10001, 0b10001, 0b10001, 0b01010, 0b00100]),
    ('W', [0b10001, 0b10001, 0b10001, 0b10101, 0b10101, 0b11011, 0b10001]),
    ('X', [0b10001, 0b10001, 0b01010, 0b00100, 0b01010, 0b10001, 0b10001]),
    ('Y', [0b10001, 0b10001, 0b01010, 0b00100, 0b00100, 0b00100, 0b00100]),
    ('Z', [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b11111]),
    ('0', [0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110]),
    ('1', [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110]),
    ('2', [0b01110, 0b10001, 0b00001, 0b00010, 0b00100, 0b01000, 0b11111]),
    ('3', [0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110]),
    ('4', [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010]),
    ('5', [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110]),
    ('6', [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110]),
    ('7', [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000]),
    ('8', [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110]),
    ('9', [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100]),
    ('.', [0b00000, 0b00000, 0b00000, 0b00000, 0b00000, 0b01100, 0b01100]),
    (',', [0b00000, 0b00000, 0b00000, 0b00000, 0b01100, 0b00100, 0b01000]),
    (':', [0b00000, 0b01100, 0b01100, 0b00000, 0b01100, 0b01100, 0b00000]),
    ('-', [0b00000, 0b00000, 0b00000, 0b11111, 0b00000, 0b00000, 0b00000]),
    ('_', [0b00000, 0b00000, 0b00000, 0b00000, 0b00000, 0b00000, 0b11111]),
    ('+', [0b00000, 0b00100, 0b00100, 0b11111, 0b00100, 0b00100, 0b00000]),
    ('=', [0b00000, 0b00000, 0b11111, 0b00000, 0b11111, 0b00000, 0b00000]),
    ('/', [0b00001, 0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b10000]),
    ('(', [0b00010, 0b00100, 0b01000, 0b01000, 0b01000, 0b00100, 0b00010]),
    (')', [0b01000, 0b00100, 0b00010, 0b00010, 0b00010, 0b00100, 0b01000]),
];

/// The width of a text in pixels.
pub fn width(text: &str, scale: u32) -> u32 {
    let characters = u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
    characters.saturating_mul(ADVANCE).saturating_sub(1).saturating_mul(scale)
}

/// The text, or as much of its end as fits: the end of a file's name says most.
pub fn fit(text: &str, scale: u32, width: u32) -> String {
    // Counts one dot after every character, including the last one.
    let room = ((width / scale + 1) / ADVANCE) as usize;
    let skipped = text.chars().count().saturating_sub(room);
    text.chars().skip(skipped).collect()
}

/// Draws a text, and omits everything outside the picture.
pub fn draw(picture: &mut RgbImage, (left, top): (u32, u32), text: &str, scale: u32, ink: Rgb<u8>) {
    for (index, character) in (0..).zip(text.chars()) {
        for (row, dots) in (0..).zip(glyph(character)) {
            for column in (0..WIDTH).filter(|column| dots >> (WIDTH - 1 - column) & 1 == 1) {
                let (x, y) = (left + (index * ADVANCE + column) * scale, top + row * scale);
                dot(picture, (x, y), scale, ink);
            }
        }
    }
}

fn dot(picture: &mut RgbImage, (left, top): (u32, u32), side: u32, ink: Rgb<u8>) {
    let places = (0..side).flat_map(|y| (0..side).map(move |x| (left + x, top + y)));
    for (x, y) in places {
        if let Some(pixel) = picture.get_pixel_mut_checked(x, y) {
            *pixel = ink;
        }
    }
}

fn glyph(character: char) -> Glyph {
    let capital = character.to_ascii_uppercase();
    GLYPHS.iter().find(|(known, _)| *known == capital).map_or(BOX, |(_, glyph)| *glyph)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLACK: Rgb<u8> = Rgb([0; 3]);
    const WHITE: Rgb<u8> = Rgb([255; 3]);

    /// The drawn text, as lines of characters.
    fn drawn(text: &str, (width, height): (u32, u32), scale: u32) -> Vec<String> {
        let mut picture = RgbImage::from_pixel(width, height, WHITE);
        draw(&mut picture, (0, 0), text, scale, BLACK);
        let row = |y| (0..width).map(move |x| (x, y));
        (0..height)
            .map(|y| row(y).map(|(x, y)| if *picture.get_pixel(x, y) == BLACK { '#' } else { '.' }).collect())
            .collect()
    }

    #[test]
    fn text_looks_like_its_letters() {
        let expected = [
            "#...#.#.....",
            "#...#.#.....",
            "#...#.#.....",
            "#####.#.....",
            "#...#.#.....",
            "#...#.#.....",
            "#...#.#####.",
        ];
        assert_eq!(drawn("hl", (12, 7), 1), expected);
    }

    #[test]
    fn a_larger_scale_makes_larger_dots() {
        assert_eq!(drawn("-", (10, 14), 2)[6..9], ["##########", "##########", ".........."]);
    }

    #[test]
    fn no_two_characters_look_the_same() {
        for (index, (one, shape)) in GLYPHS.iter().enumerate() {
            let twin = GLYPHS[index + 1..].iter().find(|(_, other)| other == shape);
            assert_eq!(twin.map(|(other, _)| (one, other)), None);
            assert!(shape.iter().all(|row| *row < 32), "{one} is wider than {WIDTH} dots");
        }
        assert_eq!(glyph('é'), BOX);
    }

    #[test]
    fn what_does_not_fit_is_cut_at_its_beginning_or_not_drawn() {
        assert_eq!(width("AB", 2), 22);
        assert_eq!(fit("IMG_1.jpg", 2, 22), "pg");
        assert_eq!(fit("AB", 2, 21), "B");
        assert_eq!(fit("AB", 2, 4), "");
        assert_eq!(drawn("HHH", (6, 2), 1), ["#...#.", "#...#."]);
    }
}
