//! Contact sheets: the results of a run in one picture.

use annotate::font;
use image::{Rgb, RgbImage, imageops};

use crate::tiles;

/// How results are arranged.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Results per row.
    columns: u32,
    /// The maximum size of a result; larger ones are shrunk.
    cell: (u32, u32),
    /// Space between the cells and around them.
    gap: u32,
}

/// Unrelated pictures. The cards of `thumbnail` and `annotate` fit.
pub const PICTURES: Layout = Layout { columns: 6, cell: (272, 236), gap: 20 };
/// The tiles of one picture, close together.
pub const TILES: Layout = Layout { columns: tiles::COLUMNS, cell: (96, 92), gap: 4 };

/// Height above the cells, for the title.
const HEAD: u32 = 84;
/// Space to the left of the title and above it.
const MARGIN: u32 = 20;

const TITLE_SCALE: u32 = 4;
const SUBTITLE_SCALE: u32 = 2;
const WALL: Rgb<u8> = Rgb([38, 41, 51]);
const SHADOW: Rgb<u8> = Rgb([26, 28, 36]);
const TITLE: Rgb<u8> = Rgb([250, 249, 246]);
const SUBTITLE: Rgb<u8> = Rgb([158, 166, 184]);

impl Layout {
    /// The size of a sheet with this many results.
    fn dimensions(self, results: usize) -> (u32, u32) {
        let rows = u32::try_from(results).unwrap_or(u32::MAX).div_ceil(self.columns);
        (self.gap + self.columns * (self.cell.0 + self.gap), HEAD + rows * (self.cell.1 + self.gap))
    }

    /// Arranges the results in their order, below a title and a subtitle.
    pub fn sheet(self, results: &[RgbImage], title: &str, subtitle: &str) -> RgbImage {
        let (width, height) = self.dimensions(results.len());
        let mut sheet = RgbImage::from_pixel(width, height, WALL);
        font::draw(&mut sheet, (MARGIN, MARGIN), title, TITLE_SCALE, TITLE);
        let below = MARGIN + font::HEIGHT * TITLE_SCALE + 10;
        font::draw(&mut sheet, (MARGIN, below), subtitle, SUBTITLE_SCALE, SUBTITLE);
        for (index, result) in (0..).zip(results) {
            let (column, row) = (index % self.columns, index / self.columns);
            let left = self.gap + column * (self.cell.0 + self.gap);
            let top = HEAD + row * (self.cell.1 + self.gap);
            self.hang(&mut sheet, (left, top), result);
        }
        sheet
    }

    /// Draws a result in the middle of its cell, with a shadow.
    fn hang(self, sheet: &mut RgbImage, (left, top): (u32, u32), result: &RgbImage) {
        let small;
        let (width, height) = self.cell;
        let result = if result.width() > width || result.height() > height {
            small = image::DynamicImage::from(result.clone()).thumbnail(width, height).into_rgb8();
            &small
        } else {
            result
        };
        let left = left + (width - result.width()) / 2;
        let top = top + (height - result.height()) / 2;
        let shadow = RgbImage::from_pixel(result.width(), result.height(), SHADOW);
        imageops::replace(sheet, &shadow, (left + 4).into(), (top + 5).into());
        imageops::replace(sheet, result, left.into(), top.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RED: Rgb<u8> = Rgb([255, 0, 0]);

    #[test]
    fn each_result_is_in_the_middle_of_its_own_cell() {
        let results = vec![RgbImage::from_pixel(100, 50, RED); 8];
        let Layout { columns, cell, gap } = PICTURES;
        let sheet = PICTURES.sheet(&results, "TITLE", "");
        assert_eq!(sheet.dimensions(), PICTURES.dimensions(8));
        assert_eq!(sheet.height(), HEAD + 2 * (cell.1 + gap));
        let shown = |x: u32, y: u32| *sheet.get_pixel(x, y) == RED;
        let middle = |column: u32, row: u32| {
            (gap + column * (cell.0 + gap) + cell.0 / 2, HEAD + row * (cell.1 + gap) + cell.1 / 2)
        };
        for index in 0..8 {
            let (x, y) = middle(index % columns, index / columns);
            assert!(shown(x, y) && !shown(x + 51, y) && !shown(x, y - 26), "result {index}");
        }
        let (x, y) = middle(2, 1);
        assert!(!shown(x, y), "there are eight");
    }

    #[test]
    fn what_is_too_large_is_made_smaller_with_its_proportions() {
        let Layout { cell, gap, .. } = PICTURES;
        let sheet = PICTURES.sheet(&[RgbImage::from_pixel(2_720, 1_000, RED)], "", "");
        let red = |x: &u32| *sheet.get_pixel(*x, HEAD + cell.1 / 2) == RED;
        assert_eq!((0..sheet.width()).filter(red).count(), 272);
        let red = |y: &u32| *sheet.get_pixel(gap + cell.0 / 2, *y) == RED;
        assert_eq!((0..sheet.height()).filter(red).count(), 100);
    }

    #[test]
    fn the_cards_of_the_demo_fit_into_their_cells() {
        let tile = crate::paint::paint(0);
        let tile = (tile.width() / tiles::COLUMNS, tile.height() / tiles::ROWS);
        for (layout, (width, height)) in [(PICTURES, (256, 192)), (TILES, tile)] {
            let card = annotate::card(&RgbImage::from_pixel(width, height, RED), "IMG_1.jpg");
            assert!(
                card.width() <= layout.cell.0 && card.height() <= layout.cell.1,
                "{:?}",
                card.dimensions()
            );
        }
    }
}
