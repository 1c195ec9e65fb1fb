//! A task with room for improvement, and a reward that can be verified.

use rand::Rng;

/// A number of three digits times a small one, in the form that the bundled model knows from training. Sampled at temperature
/// 1.6 it gets a good part of the results wrong.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// From 100 to 399.
    pub number: u32,
    /// From 3 to 5.
    pub factor: u32,
}

impl Problem {
    /// Any of them.
    pub fn draw(random: &mut impl Rng) -> Self {
        Self {
            number: random.random_range(100..400),
            factor: random.random_range(3..6),
        }
    }

    /// The problem in words.
    pub fn prompt(self) -> String {
        let Self { number, factor } = self;
        format!(
            "Tina has {number} tickets. A friend has {factor} times as many, and Tina takes that amount instead. What is \
             the number of tickets now?"
        )
    }

    /// From 0 to 1: a quarter for writing the right product down, a quarter by how many leading digits of the answer are
    /// right, half for the answer.
    ///
    /// ```
    /// let problem = examples::arithmetic::Problem { number: 123, factor: 4 };
    /// assert_eq!(problem.reward("123 * 4 = 492\n#### 492"), 1.0);
    /// assert_eq!(problem.reward("123 * 4 = 432\n#### 432"), 0.25 + 0.25 / 3.0);
    /// assert_eq!(problem.reward("no idea"), 0.0);
    /// ```
    pub fn reward(self, text: &str) -> f64 {
        let Self { number, factor } = self;
        let wanted = (number * factor).to_string();
        let answer = text.rsplit_once("####").map_or("", |(_, answer)| answer.trim());
        let same = answer.bytes().zip(wanted.bytes()).take_while(|(a, b)| a == b);
        let digits = match answer.len() == wanted.len() {
            true => same.count() as f64 / wanted.len() as f64,
            false => 0.0,
        };
        let product = text.starts_with(&format!("{number} * {factor} = "));
        0.25 * f64::from(product) + 0.25 * digits + 0.5 * f64::from(answer == wanted)
    }
}
