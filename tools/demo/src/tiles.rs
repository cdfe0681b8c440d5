//! Two thousand small pictures: some of the cameras' pictures, cut into tiles. Painting that many would take
//! longer than processing them.

use image::{ImageFormat, ImageResult, RgbImage, imageops};

use crate::{
    paint::paint,
    pictures::{Picture, encode, title},
};

/// The number of tiles.
pub const COUNT: usize = 2_000;
/// Tiles in a row of a picture, wide enough for `annotate` to write the file name below each.
pub const COLUMNS: u32 = 8;
/// Rows of tiles in a picture.
pub const ROWS: u32 = 10;
const PER_PICTURE: usize = (COLUMNS * ROWS) as usize;

/// All tiles, picture by picture.
pub fn all() -> ImageResult<Vec<Picture>> {
    let mut tiles = Vec::with_capacity(COUNT);
    for index in 0..COUNT / PER_PICTURE {
        for (number, tile) in cut(&paint(index)).enumerate() {
            tiles.push(Picture {
                name: format!("{}{number:02}.jpg", folder(index)),
                content: encode(&tile, ImageFormat::Jpeg)?,
            });
        }
    }
    Ok(tiles)
}

/// The folder of a picture's tiles: `north/IMG_2001/`.
pub fn folder(index: usize) -> String {
    format!("{}/", title(index))
}

/// The tiles of a picture, row by row.
fn cut(picture: &RgbImage) -> impl Iterator<Item = RgbImage> {
    let (width, height) = (picture.width() / COLUMNS, picture.height() / ROWS);
    (0..COLUMNS * ROWS).map(move |number| {
        let (left, top) = (number % COLUMNS * width, number / COLUMNS * height);
        imageops::crop_imm(picture, left, top, width, height).to_image()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_are_two_thousand_with_different_names() {
        let tiles = all().unwrap();
        let names: BTreeSet<_> = tiles.iter().map(|tile| &tile.name).collect();
        assert_eq!((tiles.len(), names.len()), (COUNT, COUNT));
        assert!(tiles.iter().all(|tile| tile.content.len() < 5_000), "they are small");
        image::load_from_memory(&tiles[COUNT - 1].content).unwrap();
    }

    #[test]
    fn the_names_of_a_pictures_tiles_sort_in_the_order_of_the_picture() {
        let tiles = all().unwrap();
        let names: Vec<_> = tiles.iter().filter(|tile| tile.name.starts_with(&folder(1))).collect();
        assert_eq!(names.len(), PER_PICTURE);
        assert!(names.is_sorted_by_key(|tile| &tile.name));
        assert_eq!(names[0].name, "south/DSC_0417/00.jpg");
    }

    #[test]
    fn tiles_put_together_are_the_picture() {
        let picture = paint(0);
        let (width, height) = (picture.width() / COLUMNS, picture.height() / ROWS);
        let mut whole = RgbImage::new(picture.width(), picture.height());
        for (number, tile) in (0..).zip(cut(&picture)) {
            let (left, top) = (number % COLUMNS * width, number / COLUMNS * height);
            imageops::replace(&mut whole, &tile, left.into(), top.into());
        }
        assert_eq!(whole, picture);
    }

    #[test]
    fn the_name_of_a_tile_fits_below_it() {
        for index in 0..2 {
            let width = paint(index).width() / COLUMNS;
            assert_eq!(annotate::font::fit("07.jpg", 2, width), "07.jpg");
        }
    }
}
