//! Paints the cameras' pictures: six subjects in seven palettes, the same every time.

use std::f32::consts::TAU;

use image::{Rgb, RgbImage};

/// The size of the northern camera's pictures and of the southern camera's.
const CAMERAS: [(u32, u32); 2] = [(640, 480), (600, 400)];

/// Paints one picture: subjects and palettes rotate at different speeds, so that all pictures differ.
pub fn paint(index: usize) -> RgbImage {
    let (width, height) = CAMERAS[index % 2];
    let mut dice = Dice::new(index as u64);
    let palette = PALETTES[(index * 5 + index / 6) % PALETTES.len()];
    let subject: Box<dyn Fn(f32, f32) -> Colour> = match index % 6 {
        0 => mountains(palette, &mut dice),
        1 => lights(palette, &mut dice),
        2 => plasma(palette, &mut dice),
        3 => sea(palette, &mut dice),
        4 => town(palette, &mut dice),
        _ => julia(palette, &mut dice),
    };
    // y runs from 0 to 1 downwards; the range of x follows from the proportions.
    let scale = height as f32;
    RgbImage::from_fn(width, height, |x, y| subject(x as f32 / scale, y as f32 / scale).rgb())
}

/// Red, green and blue from 0 to 1.
#[derive(Clone, Copy)]
struct Colour([f32; 3]);

impl Colour {
    fn mix(self, other: Self, share: f32) -> Self {
        let share = share.clamp(0.0, 1.0);
        Self(std::array::from_fn(|channel| self.0[channel] * (1.0 - share) + other.0[channel] * share))
    }

    fn rgb(self) -> Rgb<u8> {
        Rgb(self.0.map(|channel| (channel.clamp(0.0, 1.0) * 255.0) as u8))
    }
}

/// From the brightest to the darkest.
type Palette = [Colour; 4];

const fn colour(hex: u32) -> Colour {
    Colour([(hex >> 16 & 0xff) as f32 / 255.0, (hex >> 8 & 0xff) as f32 / 255.0, (hex & 0xff) as f32 / 255.0])
}

const PALETTES: [Palette; 7] = [
    [colour(0xffe3b3), colour(0xf7a072), colour(0xb5517a), colour(0x2b2d5b)], // dusk
    [colour(0xe8f7ee), colour(0x8fd3c1), colour(0x2a8c8c), colour(0x123b4a)], // lagoon
    [colour(0xfdf3d0), colour(0xf2c14e), colour(0xd1603d), colour(0x4a2545)], // autumn
    [colour(0xeaf2ff), colour(0x9cc4f2), colour(0x4a6fb5), colour(0x1b2449)], // frost
    [colour(0xf4f9d8), colour(0xa7cb6b), colour(0x4c8a50), colour(0x163832)], // meadow
    [colour(0xffe9f0), colour(0xf2a1c0), colour(0x9a5fb5), colour(0x2c1b4d)], // orchid
    [colour(0xfff4e0), colour(0xe8b98a), colour(0xa86b4c), colour(0x3a2a2a)], // clay
];

/// The palette as a scale from 0 (bright) to 1 (dark).
fn at(palette: &Palette, place: f32) -> Colour {
    let place = place.clamp(0.0, 1.0) * (palette.len() - 1) as f32;
    let before = (place as usize).min(palette.len() - 2);
    palette[before].mix(palette[before + 1], place - before as f32)
}

fn mountains(palette: Palette, dice: &mut Dice) -> Box<dyn Fn(f32, f32) -> Colour> {
    const RANGES: usize = 4;
    let sun = (dice.between(0.3, 1.2), dice.between(0.2, 0.35));
    let ranges: [[f32; 4]; RANGES] = std::array::from_fn(|_| std::array::from_fn(|_| dice.between(0.0, TAU)));
    Box::new(move |x, y| {
        let height = |range: usize| {
            let [one, two, three, four] = ranges[range];
            let nearness = range as f32;
            0.42 + 0.14 * nearness
                + 0.09 * (x * 2.3 + one).sin()
                + 0.05 * (x * 6.1 + two).sin()
                + 0.02 * (x * 15.0 + three).sin()
                + 0.008 * (x * 41.0 + four).sin()
        };
        // The nearest range that reaches this point hides everything behind it.
        match (0..RANGES).rev().find(|range| y > height(*range)) {
            Some(range) => {
                let haze = (y - height(range)) * 0.9;
                at(&palette, 0.45 + 0.17 * range as f32).mix(palette[1], 0.35 - haze)
            }
            None => {
                let distance = (x - sun.0).hypot(y - sun.1);
                let sky = at(&palette, 0.62 - y * 0.95);
                sky.mix(palette[0], 0.08 / distance - 0.1).mix(colour(0xffffff), (0.075 - distance) * 120.0)
            }
        }
    })
}

fn lights(palette: Palette, dice: &mut Dice) -> Box<dyn Fn(f32, f32) -> Colour> {
    let lights: Vec<(f32, f32, f32, Colour)> = (0..26)
        .map(|_| {
            let place = (dice.between(-0.1, 1.7), dice.between(-0.1, 1.1));
            (place.0, place.1, dice.between(0.03, 0.17), at(&palette, dice.between(0.0, 0.55)))
        })
        .collect();
    Box::new(move |x, y| {
        let dark = at(&palette, 0.78 + 0.22 * y);
        lights.iter().fold(dark, |below, (left, top, radius, light)| {
            let distance = (x - left).hypot(y - top) / radius;
            let edge = ((1.0 - distance) * radius * 180.0).clamp(0.0, 1.0);
            below.mix(*light, edge * (0.18 + 0.3 * distance.powi(4)))
        })
    })
}

fn plasma(palette: Palette, dice: &mut Dice) -> Box<dyn Fn(f32, f32) -> Colour> {
    let [one, two, three, four]: [f32; 4] = std::array::from_fn(|_| dice.between(0.0, TAU));
    let size = dice.between(4.0, 8.0);
    Box::new(move |x, y| {
        let bent = (x + 0.35 * (y * 4.0 + one).sin(), y + 0.25 * (x * 5.0 + two).cos());
        let wave = (bent.0 * size + three).sin()
            + (bent.1 * size * 0.8 + four).sin()
            + ((bent.0 - 0.7).hypot(bent.1 - 0.5) * size * 2.2).sin();
        at(&palette, 0.5 + wave / 5.4)
    })
}

fn sea(palette: Palette, dice: &mut Dice) -> Box<dyn Fn(f32, f32) -> Colour> {
    let [one, two, three]: [f32; 3] = std::array::from_fn(|_| dice.between(0.0, TAU));
    let (horizon, moon) = (dice.between(0.38, 0.5), dice.between(0.35, 1.15));
    Box::new(move |x, y| {
        let distance = (x - moon).hypot(y - horizon + 0.16);
        if y < horizon {
            let sky = at(&palette, 0.55 - 0.5 * y / horizon);
            return sky
                .mix(palette[0], 0.05 / distance - 0.12)
                .mix(colour(0xfffdf5), (0.09 - distance) * 110.0);
        }
        let depth = y - horizon;
        // The nearer the waves, the farther apart they are.
        let far = 1.0 / (depth + 0.06);
        let wave = (far * 9.0 + (x * 3.0 + one).sin() * 1.2).sin() * 0.5
            + (far * 23.0 + x * 5.0 + two).sin() * 0.3
            + (x * 30.0 * (1.0 - depth) + far * 40.0 + three).sin() * 0.2;
        let glitter = (1.0 - (x - moon).abs() / (0.05 + depth * 0.55)) * (wave + 0.2);
        at(&palette, 0.55 + 0.55 * depth + wave * 0.07).mix(palette[0], glitter)
    })
}

fn town(palette: Palette, dice: &mut Dice) -> Box<dyn Fn(f32, f32) -> Colour> {
    let rows: [Vec<(f32, f32)>; 2] = std::array::from_fn(|row| {
        let mut left = -0.05;
        std::iter::from_fn(|| {
            left += dice.between(0.07, 0.16);
            let nearest = row as f32;
            (left < 1.9).then(|| (left, dice.between(0.3 + 0.2 * nearest, 0.62 + 0.2 * nearest)))
        })
        .collect()
    });
    let stars: Vec<(f32, f32)> = (0..60).map(|_| (dice.between(0.0, 1.8), dice.between(0.0, 0.45))).collect();
    let seed = dice.next();
    Box::new(move |x, y| {
        for (row, houses) in rows.iter().enumerate().rev() {
            let Some(house) = houses.iter().position(|(right, _)| x < *right) else { continue };
            let (right, top) = houses[house];
            if y < top {
                continue;
            }
            let wall = at(&palette, 0.74 + 0.2 * row as f32);
            // Windows in a grid; the dice decide for each window whether it is lit.
            let (across, down) = ((right - x) / 0.022, (y - top) / 0.03);
            let frame = across.fract() > 0.55 || down.fract() > 0.5 || down < 1.0 || across > 40.0;
            let window = (across as u64) << 32 | (down as u64) << 16 | (house as u64) << 4 | row as u64;
            let lit = Dice::new(seed ^ window).next() % 5 < 2;
            return if frame || !lit { wall } else { wall.mix(palette[0], 0.9) };
        }
        let sky = at(&palette, 0.95 - 0.75 * y);
        let star = stars.iter().any(|star| (x - star.0).hypot(y - star.1) < 0.004);
        if star { sky.mix(palette[0], 0.8) } else { sky }
    })
}

fn julia(palette: Palette, dice: &mut Dice) -> Box<dyn Fn(f32, f32) -> Colour> {
    const STEPS: u32 = 90;
    let (angle, zoom) = (dice.between(0.0, TAU), dice.between(1.9, 2.5));
    // On the boundary of the Mandelbrot set's main cardioid, where Julia sets are richest.
    let seed =
        (0.5 * angle.cos() - 0.26 * (2.0 * angle).cos(), 0.5 * angle.sin() - 0.26 * (2.0 * angle).sin());
    Box::new(move |x, y| {
        let mut place = ((x - 0.75) * zoom, (y - 0.5) * zoom);
        for step in 0..STEPS {
            let square = place.0 * place.0 + place.1 * place.1;
            if square > 16.0 {
                // Fractions of a step avoid visible bands.
                let smooth = step as f32 + 1.0 - (square.ln() / 2.0).log2();
                return at(&palette, 1.0 - (smooth / 24.0).sqrt());
            }
            place = (place.0 * place.0 - place.1 * place.1 + seed.0, 2.0 * place.0 * place.1 + seed.1);
        }
        palette[3].mix(palette[2], 0.25)
    })
}

/// Random enough for pictures, and the same on every machine (SplitMix64).
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() >> 40) as f32 / (1_u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::COUNT;
    use std::collections::BTreeSet;

    #[test]
    fn each_shows_something() {
        for index in 0..COUNT {
            let picture = paint(index);
            let colours: BTreeSet<_> = picture.pixels().map(|pixel| pixel.0).collect();
            assert!(colours.len() > 40, "picture {index} has {} colours", colours.len());
        }
    }
}
