//! The contact sheet: all results of a run in one picture.

use annotate::font;
use image::{Rgb, RgbImage, imageops};

/// Results side by side.
pub const COLUMNS: u32 = 6;
/// What a result may measure; a larger one is made smaller. The cards of `thumbnail` and `annotate` fit.
const CELL: (u32, u32) = (272, 236);
/// Between the cells and around them.
const GAP: u32 = 20;
/// Above the cells, for the title.
const HEAD: u32 = 84;

const TITLE_SCALE: u32 = 4;
const SUBTITLE_SCALE: u32 = 2;
const WALL: Rgb<u8> = Rgb([38, 41, 51]);
const SHADOW: Rgb<u8> = Rgb([26, 28, 36]);
const TITLE: Rgb<u8> = Rgb([250, 249, 246]);
const SUBTITLE: Rgb<u8> = Rgb([158, 166, 184]);

/// How large the sheet of so many results is.
pub fn dimensions(results: usize) -> (u32, u32) {
    let rows = u32::try_from(results).unwrap_or(u32::MAX).div_ceil(COLUMNS);
    (GAP + COLUMNS * (CELL.0 + GAP), HEAD + rows * (CELL.1 + GAP))
}

/// The results in the order in which they come, under a title and a line below it.
pub fn make(results: &[RgbImage], title: &str, subtitle: &str) -> RgbImage {
    let (width, height) = dimensions(results.len());
    let mut sheet = RgbImage::from_pixel(width, height, WALL);
    font::draw(&mut sheet, (GAP, GAP), title, TITLE_SCALE, TITLE);
    let below = GAP + font::HEIGHT * TITLE_SCALE + 10;
    font::draw(&mut sheet, (GAP, below), subtitle, SUBTITLE_SCALE, SUBTITLE);
    for (index, result) in (0..).zip(results) {
        let cell = (GAP + index % COLUMNS * (CELL.0 + GAP), HEAD + index / COLUMNS * (CELL.1 + GAP));
        hang(&mut sheet, cell, result);
    }
    sheet
}

/// A result in the middle of its cell, with a shadow.
fn hang(sheet: &mut RgbImage, cell: (u32, u32), result: &RgbImage) {
    let small;
    let result = if result.width() > CELL.0 || result.height() > CELL.1 {
        small = image::DynamicImage::from(result.clone()).thumbnail(CELL.0, CELL.1).into_rgb8();
        &small
    } else {
        result
    };
    let left = cell.0 + (CELL.0 - result.width()) / 2;
    let top = cell.1 + (CELL.1 - result.height()) / 2;
    let shadow = RgbImage::from_pixel(result.width(), result.height(), SHADOW);
    imageops::replace(sheet, &shadow, (left + 4).into(), (top + 5).into());
    imageops::replace(sheet, result, left.into(), top.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    const RED: Rgb<u8> = Rgb([255, 0, 0]);

    #[test]
    fn each_result_is_in_the_middle_of_its_own_cell() {
        let results = vec![RgbImage::from_pixel(100, 50, RED); 8];
        let sheet = make(&results, "TITLE", "");
        assert_eq!(sheet.dimensions(), dimensions(8));
        assert_eq!(dimensions(8).1, HEAD + 2 * (CELL.1 + GAP));
        let shown = |x: u32, y: u32| *sheet.get_pixel(x, y) == RED;
        let middle = |column: u32, row: u32| {
            (GAP + column * (CELL.0 + GAP) + CELL.0 / 2, HEAD + row * (CELL.1 + GAP) + CELL.1 / 2)
        };
        for index in 0..8 {
            let (x, y) = middle(index % COLUMNS, index / COLUMNS);
            assert!(shown(x, y) && !shown(x + 51, y) && !shown(x, y - 26), "result {index}");
        }
        let (x, y) = middle(2, 1);
        assert!(!shown(x, y), "there are eight");
    }

    #[test]
    fn what_is_too_large_is_made_smaller_with_its_proportions() {
        let sheet = make(&[RgbImage::from_pixel(2_720, 1_000, RED)], "", "");
        let red = |x: &u32| *sheet.get_pixel(*x, HEAD + CELL.1 / 2) == RED;
        assert_eq!((0..sheet.width()).filter(red).count(), 272);
        let red = |y: &u32| *sheet.get_pixel(GAP + CELL.0 / 2, *y) == RED;
        assert_eq!((0..sheet.height()).filter(red).count(), 100);
    }

    #[test]
    fn the_cards_of_the_demo_fit_into_a_cell() {
        let picture = RgbImage::from_pixel(256, 192, RED);
        let card = annotate::card(&picture, "IMG_1.jpg");
        assert!(card.width() <= CELL.0 && card.height() <= CELL.1, "{:?}", card.dimensions());
    }
}
